"""What is quantised, adapted and trained is counted and reported, or refused before a weight is read."""

import pytest
from model_helpers import on_meta

from kit.config.settings.method import MethodSettings
from kit.model.adapters.adapter import attach_adapter
from kit.model.adapters.reach import freeze_unreached_parts
from kit.model.four_bit import quantised_on_meta
from kit.model.summary import aux_loss_coef, check_parts, describe_parts


def settings(**changes):
    return MethodSettings(**{"model_name_or_path": "m", **changes})


def problems(family, router_aux_loss_coef=None, **changes):
    return "\n".join(map(str, check_parts(settings(**changes), on_meta(family), router_aux_loss_coef)))


def described(family, **changes):
    """As a dry run describes it."""
    mine, model = settings(**changes), on_meta(family)
    model = quantised_on_meta(model) if mine.method == "qlora" else model
    freeze_unreached_parts(model)
    return describe_parts(attach_adapter(model, mine), mine)


# What all-linear leaves out


@pytest.mark.slow
def test_fused_experts_that_all_linear_leaves_out_are_reported_with_their_names():
    for method in ("lora", "qlora"):
        lines = described("mixtral", method=method)
        assert "--lora_target_modules all-linear,experts.gate_up_proj,experts.down_proj" in str(lines)
        assert not any("unquantised" in line for line in lines)


@pytest.mark.slow
def test_modules_whose_adapters_peft_could_not_load_again_are_reported():
    assert "peft could not load adapters of model.layers.1.mlp.shared_experts.gate_proj" in str(described("laguna"))


def test_a_model_that_changes_its_weights_to_evaluate_is_refused_with_the_line_that_fixes_it():
    model = on_meta("rwkv")
    assert not list(check_parts(settings(method="lora"), model))
    model.config.rescale_every = 6
    (problem,) = check_parts(settings(method="lora"), model)
    assert "divides its weights" in problem.found and '"rescale_every": 0' in problem.fix


# What qlora does


def test_qlora_is_refused_if_it_would_quantise_nothing():
    text = problems("falcon", method="qlora")
    assert "quantise none of the weights of FalconForCausalLM" in text and "FalconLinear" in text
    assert "--method lora" in text
    assert problems("falcon", method="lora") == problems("llama", method="qlora") == ""


@pytest.mark.parametrize("name", ["experts", "o_proj", "mlp"])
def test_modules_in_4_bits_do_not_train_as_they_are(name):
    whole = {"lora_target_modules": ["q_proj"], "lora_modules_to_save": [name, "gate"]}
    text = problems("qwen3_moe", method="qlora", **whole)
    assert f"lora_modules_to_save: '{name}', whose weights are in 4 bits" in text and "'gate'" not in text
    assert problems("qwen3_moe", method="lora", **whole) == ""


def test_experts_that_train_as_they_are_are_not_left_out():
    lines = described("qwen3_moe", method="lora", lora_modules_to_save=["experts"])
    assert "fused experts" not in str(lines)


# Routers


def test_the_weight_of_the_routers_loss_is_the_models_own_unless_it_is_set():
    asked, silent, dense = on_meta("mixtral"), on_meta("mixtral"), on_meta("llama")
    silent.config.output_router_logits = False
    assert aux_loss_coef(asked, None) == 0.1
    assert aux_loss_coef(silent, None) == aux_loss_coef(dense, None) == 0
    assert aux_loss_coef(silent, 0.5) == 0.5
    assert aux_loss_coef(asked, 0) == 0
    assert "0.1 x the load-balancing (auxiliary) loss" in str(described("mixtral"))


# Others
