"""Which modules all-linear adapts and qlora quantises, and which are left out."""

import pytest
from model_helpers import on_meta

from kit.config.settings.method import MethodSettings
from kit.model.adapters.adapter import attach_adapter
from kit.model.adapters.targets import all_linear_targets


def settings(**changes):
    return MethodSettings(**{"model_name_or_path": "m", **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapted", "left"),
    [
        ("qwen2_moe", "mlp.shared_expert.gate_proj", "mlp.shared_expert_gate"),
        ("phimoe", "self_attn.q_proj", "mlp.router"),
        ("llama4_text", "feed_forward.shared_expert.up_proj", "feed_forward.router"),
        ("deepseek_v3", "self_attn.o_proj", "mlp.shared_experts.up_proj"),  # peft takes it for a fused expert
        ("mamba", "mixer.in_proj", "mixer.out_proj"),
        ("gemma3", "language_model.layers.0.mlp.up_proj", "vision_tower"),
        ("llama", "mlp.gate_proj", "lm_head"),
        ("laguna", "mlp.down_proj", "mlp.shared_experts.down_proj"),  # peft would not find it again
        ("zamba2", "adapter_list.0.0", "layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_list.1.0"),
    ],
)
def test_all_linear_adapts_experts_but_no_router_and_nothing_without_a_gradient(family, adapted, left):
    names = all_linear_targets(on_meta(family))
    assert any(adapted in name for name in names)
    assert not any(f".{left}." in f".{name}." for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "mamba", "gemma3"])
def test_peft_adapts_what_all_linear_names_and_nothing_else(family):
    names = all_linear_targets(on_meta(family))
    adapted = attach_adapter(on_meta(family), settings()).get_base_model()
    assert {name for name, module in adapted.named_modules() if hasattr(module, "lora_A")} == set(names)
