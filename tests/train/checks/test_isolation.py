"""A model in which packed samples influence each other is refused before training."""

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.tiny_families import tiny_config
from kit.config.settings.method import MethodSettings
from kit.data.feed.data_ranks import Ranks
from kit.model.build import check_model
from kit.model.layers import attention, packs
from kit.model.layers.loss_head import install_loss_head
from kit.strategy.accelerator import Prepared
from kit.system.errors import UserError
from kit.train.checks.isolation import check_isolation

SHAPE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def random_model(kind, config, implementation, size=5.0):
    """A random model; with ``size`` 5 its weights are large enough for a leak to be seen in the losses."""
    attention.register_varlen()
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= size if parameter.dim() > 1 else 1
    install_loss_head(model)
    return model


def check(model, pack_length=64):
    check_isolation(Prepared(Accelerator(cpu=True), Ranks(), model, None, None), 100, pack_length)


@pytest.mark.parametrize("implementation", ["sdpa", attention.VARLEN, "eager"])
def test_a_llama_keeps_the_samples_of_a_pack_apart(implementation):
    model = random_model(LlamaForCausalLM, LlamaConfig(**SHAPE, intermediate_size=64), implementation)
    check(model)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def jamba():
    return JambaConfig(
        **SHAPE, intermediate_size=64, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
        use_mamba_kernels=False,
    )  # fmt: skip


@pytest.mark.parametrize("implementation", ["sdpa", attention.VARLEN])
def test_recurrent_layers_that_are_not_known_are_refused_under_any_attention(implementation, monkeypatch):
    check(random_model(JambaForCausalLM, jamba(), implementation))
    monkeypatch.setattr(packs, "_ENDINGS", ())
    with pytest.raises(UserError, match="packing: packed samples influence each other in this model"):
        check(random_model(JambaForCausalLM, jamba(), implementation))


def test_positions_that_matter_only_at_the_end_of_a_long_pack_are_refused(monkeypatch):
    config = tiny_config("falcon")
    config.alibi, config.hidden_size, config.num_attention_heads = True, 48, 6  # slopes that bf16 rounds
    model = random_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, "sdpa")
    check(model, 1024)
    monkeypatch.setattr(packs, "_ALIBI", "")  # as in a family that is not known
    check(model, 40)
    with pytest.raises(UserError, match="losses after another sample and before it differ by"):
        check(model, 1024)


# Layers that know a token by its place in the row. They have limits of 8 tokens here, half as many as the samples.
BY_PLACE = {
    "llama4_text": "the temperature of attention",
    "minimax_m3_vl_text": "blocks of keys",
    "glm_moe_dsa": "the choice among tokens of equal score",
}

# Not every version of transformers has all of these.
MORE_BY_PLACE = [*BY_PLACE, "deepseek_v32", "axk2", "hy_v4", "dots3_note_text", "llama4"]


@pytest.mark.parametrize("family", BY_PLACE)
def test_a_layer_that_depends_on_the_position_in_the_row_is_refused(family):
    config = tiny_config(family)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with pytest.raises(UserError, match="packed samples influence each other in this model"):
        check(random_model(kind, config, "sdpa"))


@pytest.mark.parametrize("family", [each for each in MORE_BY_PLACE if each in CONFIG_MAPPING])
def test_packs_so_long_that_positions_matter_are_refused_before_weights_are_read(family):
    """In a short pack such a layer does not show, and in bfloat16 it hardly does."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    settings = MethodSettings(model_name_or_path="m")

    def problems(max_length, packing=True):
        found = check_model(settings, model.config, model, max_length=max_length, packing=packing)
        return [problem for problem in found if problem.where == "packing"]

    (problem,) = problems(48)
    longest = int(problem.fix.split()[-1])  # the fix that it names
    assert longest in (7, 8) and not problems(longest) and not problems(48, packing=False)


def test_a_leak_too_small_for_the_losses_is_refused_by_its_gradient(monkeypatch):
    monkeypatch.setattr(packs, "_ENDINGS", ())
    with pytest.raises(UserError, match=r"packed samples influence each other in this model \(a gradient passes\)"):
        check(random_model(JambaForCausalLM, jamba(), "sdpa", size=0.5))
