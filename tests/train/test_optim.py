"""Which weights the optimiser moves, and which of them decay."""

import pytest
import torch
from torch import nn

from kit.config.recipe import Recipe
from kit.train import optim

KINDS = ["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"]


def recipe(**changes):
    return Recipe(**{"model_name_or_path": "model", "dataset": "train.jsonl", **changes})


def build_optimizer(layers, settings):
    return optim.build_optimizer(layers, settings, settings.peak_learning_rate)


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    layers[3].requires_grad_(False)
    return layers


def step(layers, optimizer):
    layers(torch.arange(7)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_it_moves_what_trains_and_nothing_else(kind):
    layers = model()
    before = {name: p.detach().clone() for name, p in layers.named_parameters()}
    step(layers, build_optimizer(layers, recipe(optim=kind)))
    moved = {name for name, p in layers.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.weight", "1.weight", "1.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_biases_do_not_decay(kind):
    """Without a gradient only decay moves a weight: by ``rate x decay`` of itself."""
    layers = model()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in layers.named_parameters()}
    build_optimizer(layers, recipe(optim=kind, weight_decay=0.5, learning_rate=0.1)).step()
    for name, parameter in layers.named_parameters():
        kept = 1 - 0.1 * 0.5 if name in ("0.weight", "1.weight") else 1.0
        assert torch.allclose(parameter, before[name] * kept), name


def test_the_recipes_numbers_reach_the_update():
    """One step of AdamW by hand."""
    weight = nn.Parameter(torch.tensor([[2.0]]))
    holder = nn.Module()
    holder.weight = weight
    settings = {"learning_rate": 0.1, "adam_beta1": 0.5, "adam_beta2": 0.25, "adam_epsilon": 0.5, "weight_decay": 0.2}
    optimizer = build_optimizer(holder, recipe(**settings))
    value, first, second = 2.0, 0.0, 0.0
    for count, gradient in enumerate((3.0, -1.0), start=1):
        weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        first, second = 0.5 * first + 0.5 * gradient, 0.25 * second + 0.75 * gradient**2
        value -= 0.1 * 0.2 * value
        value -= 0.1 * (first / (1 - 0.5**count)) / ((second / (1 - 0.25**count)) ** 0.5 + 0.5)
        assert weight.item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(("method", "rate"), [("full", 2e-5), ("lora", 2e-4), ("qlora", 2e-4)])
def test_the_default_rate_follows_the_method(method, rate):
    optimizer = build_optimizer(model(), recipe(method=method))
    assert {group["lr"] for group in optimizer.param_groups} == {rate}


def test_adapters_have_no_group_without_weights():
    optimizer = build_optimizer(nn.Linear(3, 3, bias=False), recipe())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
