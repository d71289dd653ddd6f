"""What text does not reach is found out from the model's own forward, frozen and said."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import tiny_config
from kit.config.settings.method import MethodSettings
from kit.model.parts import describe_parts
from kit.model.reach import beyond_text, freeze_out_of_reach, out_of_reach


def on_meta(family):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("gemma3", ["model.vision_tower", "model.multi_modal_projector"]),
        ("afmoe", ["model.layers.1.mlp.expert_bias"]),
        ("trocr", ["model.decoder.layers.0.encoder_attn", "model.decoder.layers.0.encoder_attn_layer_norm"]),
        ("phi4_multimodal", ["model.embed_tokens_extend"]),
        ("llama", []),
    ],
)
def test_what_gets_no_gradient_from_text_is_frozen_and_said(family, parts):
    model = on_meta(family)
    found = out_of_reach(model)
    assert set(parts) <= set(found) and bool(parts) == bool(found)
    freeze_out_of_reach(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert all(name.startswith(tuple(found)) for name in frozen) and bool(frozen) == bool(parts)
    lines = "\n".join(describe_parts(model, MethodSettings(model_name_or_path="m", method="full")))
    assert all(part in lines for part in parts[:3])


@pytest.mark.slow
def test_weights_that_another_module_uses_are_trained_though_their_own_module_is_not_called():
    unreached, uncalled = beyond_text(on_meta("zamba2"))
    assert not unreached
    assert {name.split(".")[2] for name in uncalled if "adapter_list" in name} == {"1", "3"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v4"])
def test_experts_and_layers_that_need_many_tokens_are_reached(family):
    unreached, _ = beyond_text(on_meta(family))
    assert all("indexer" in name or "correction_bias" in name for name in unreached)


@pytest.mark.slow
def test_a_forward_that_cannot_be_traced_leaves_what_names_tell():
    model = on_meta("blt")
    assert beyond_text(model) == ([], [])
    assert any("patcher" in name for name in out_of_reach(model))
