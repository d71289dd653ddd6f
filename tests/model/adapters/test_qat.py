"""Quantisation-aware training computes what torchao's own fake quantisation does."""

import pytest
import torch
from helpers import matrix
from model_helpers import FP32, build, problems
from transformers import LlamaForCausalLM

from kit.config.recipe import Recipe
from kit.model.adapters import qat

TINY = "recipes/tiny/model"
IDS = torch.arange(60).view(3, 20)
needs_torchao = pytest.mark.skipif(qat.find_spec("torchao") is None, reason="the extra qat is not installed")


def recipe(**values):
    defaults = {"model_name_or_path": TINY, "dataset": "x", "max_length": 256, "method": "full"}
    return Recipe(**defaults | {"qat": "int4_weight_only"} | values)


def theirs(settings):
    """The plain model, as torchao alone prepares it."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    config = qat.quantised_as(settings)
    names = set(qat.layers(model))
    assert len(names) == 7 * model.config.num_hidden_layers
    quantize_(model, QATConfig(config, step="prepare"), filter_fn=lambda _, name: name in names)
    return model.train()


def gradients(model):
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


SCHEMES = matrix(list(qat.SCHEMES), always=4)


@needs_torchao
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_full_model_has_the_logits_and_gradients_of_torchaos_own_preparation(scheme):
    settings = recipe(qat=scheme)
    ours, other = build(settings, FP32), theirs(settings)
    wanted = gradients(other)
    assert torch.equal(ours(input_ids=IDS).logits, other(input_ids=IDS).logits)
    other.zero_grad()
    found = gradients(ours)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-7)


@needs_torchao
def test_groups_that_do_not_divide_a_row_are_refused_with_the_size_that_does():
    found = problems(recipe(qat_group_size=48))
    assert "qat: groups of 48 weights, and model.layers.0" in found
    assert not problems(recipe(qat_group_size=32)) and not problems(recipe(qat="int8_weight_only"))
