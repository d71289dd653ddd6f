"""What a method can and cannot do with a family is counted and said, or refused before a weight is read."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import tiny_config
from kit.config.settings.method import MethodSettings
from kit.model.adapter import attach_adapter, check_adapter
from kit.model.parts import (
    adaptable,
    aux_loss_coef,
    check_parts,
    describe_parts,
    quantised_on_meta,
)
from kit.model.reach import freeze_out_of_reach


def on_meta(family):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family))


def settings(**changes):
    return MethodSettings(**{"model_name_or_path": "m", **changes})


def problems(family, router_aux_loss_coef=None, **changes):
    return "\n".join(map(str, check_parts(settings(**changes), on_meta(family), router_aux_loss_coef)))


def described(family, **changes):
    """As a dry run describes it."""
    mine, model = settings(**changes), on_meta(family)
    model = quantised_on_meta(model) if mine.method == "qlora" else model
    freeze_out_of_reach(model)
    return describe_parts(attach_adapter(model, mine), mine)


# What all-linear adapts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapted", "left"),
    [
        ("qwen2_moe", "mlp.shared_expert.gate_proj", "mlp.shared_expert_gate"),
        ("afmoe", "self_attn.q_proj", "mlp.router.gate"),
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
    names = adaptable(on_meta(family))
    assert any(adapted in name for name in names)
    assert not any(f".{left}." in f".{name}." for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "phimoe", "mamba", "gemma3"])
def test_peft_adapts_what_all_linear_names_and_nothing_else(family):
    names = adaptable(on_meta(family))
    adapted = attach_adapter(on_meta(family), settings()).get_base_model()
    assert {name for name, module in adapted.named_modules() if hasattr(module, "lora_A")} == set(names)


@pytest.mark.slow
def test_fused_experts_are_adapted_if_they_are_named():
    assert "--lora_target_modules takes their names too: experts.gate_up_proj,experts.down_proj" in str(
        described("mixtral")
    )
    targets = "q_proj,experts.gate_up_proj,experts.down_proj"
    names = {
        name
        for name, p in attach_adapter(on_meta("mixtral"), settings(lora_target_modules=targets)).named_parameters()
        if p.requires_grad
    }
    assert any("q_proj" in name for name in names) and any("experts" in name for name in names)
    assert not any("k_proj" in name or "gate.weight" in name for name in names)


@pytest.mark.slow
def test_what_peft_would_not_find_again_is_said_and_refused_if_it_is_named():
    assert "peft would not find adapters of model.layers.1.mlp.shared_experts.gate_proj" in str(described("laguna"))
    named = settings(lora_target_modules="q_proj,up_proj")
    (problem,) = check_adapter(named, on_meta("laguna"))
    assert "'up_proj' is also model.layers.1.mlp.shared_experts.up_proj" in str(problem)
    assert not check_adapter(settings(lora_target_modules="q_proj"), on_meta("laguna"))


def test_a_model_that_changes_its_weights_to_evaluate_is_refused_with_the_line_that_cures_it():
    model = on_meta("rwkv")
    assert not check_parts(settings(method="lora"), model)
    model.config.rescale_every = 6
    (problem,) = check_parts(settings(method="lora"), model)
    assert "divides its weights" in problem.found and '"rescale_every": 0' in problem.fix


# What qlora does


def test_qlora_is_refused_if_it_would_quantise_nothing():
    text = problems("falcon", method="qlora")
    assert "quantise none of the weights of FalconForCausalLM" in text and "FalconLinear" in text
    assert "--method lora" in text
    assert problems("falcon", method="lora") == problems("llama", method="qlora") == ""


def test_qlora_says_how_much_it_leaves_unquantised():
    line, warning, *_ = described("mixtral", method="qlora")
    assert "% in 4 bit" in line and "8 Linear4bit" in line
    assert "unquantised" in warning and "fused experts" in warning


@pytest.mark.parametrize("family", ["afmoe", "qwen2_moe", "mamba"])
def test_qlora_leaves_routers_and_weights_that_are_read_past_their_module(family):
    model = quantised_on_meta(on_meta(family))
    four_bit = [name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"]
    assert four_bit
    assert not any(name.endswith((".gate", "shared_expert_gate", "dt_proj", "lm_head")) for name in four_bit)


# Routers


def test_the_weight_of_the_routers_loss_is_the_models_own_unless_it_is_set():
    asked, silent, dense = on_meta("mixtral"), on_meta("mixtral"), on_meta("llama")
    silent.config.output_router_logits = False
    assert aux_loss_coef(asked, None) == 0.1
    assert aux_loss_coef(silent, None) == aux_loss_coef(dense, None) == 0
    assert aux_loss_coef(silent, 0.5) == 0.5
    assert aux_loss_coef(asked, 0) == 0
    assert "0.1 x the auxiliary loss" in str(described("mixtral"))


def test_a_coefficient_without_a_router_is_refused():
    assert "LlamaForCausalLM computes no auxiliary loss" in problems("llama", router_aux_loss_coef=0.1)
    assert problems("mixtral", router_aux_loss_coef=0.1) == ""


# Others


def test_a_part_that_could_not_be_opened_again_is_not_trained_whole():
    text = problems("mllama", method="full")
    assert "knows MllamaForCausalLM only as a part of another model" in text and "--method lora" in text
    assert problems("mllama", method="lora") == ""


def test_a_dense_model_is_described_in_one_line():
    model = on_meta("llama")
    total = sum(p.numel() for p in model.parameters())
    (line,) = describe_parts(attach_adapter(model, settings()), settings())
    assert line.startswith(f"weights: {total:,} parameters; adapters on 14 Linear; trained: adapters ")
    assert "frozen: Linear " in line and "Embedding " in line


def test_tied_embeddings_count_once():
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (line,) = describe_parts(model, settings(method="full"))
    assert line.startswith(f"weights: {model.num_parameters():,} parameters; trained: Linear")
