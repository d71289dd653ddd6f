"""Muon: which weights it moves, that its bits are torch's, also on sharded matrices, and what its state is."""

import pytest
import torch
from torch import nn

from kit.config.recipe import Recipe
from kit.train.optim.muon import Muon
from kit.train.optim.optim import build_optimizer

OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


class Model(nn.Module):
    """Embedding, two layers of which one is a frozen matrix, a norm and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers, self.norm = nn.Embedding(7, 8), nn.ModuleList(), nn.LayerNorm(8)
        self.layers.extend([nn.Linear(8, 12), nn.Linear(12, 8, bias=False)])
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(8, 7, bias=False)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self):
        return self.head(self.norm(self.layers[1](self.layers[0](self.embed(torch.arange(7))))))


def built(**settings):
    model = Model()
    recipe = Recipe(model_name_or_path="m", dataset="x.jsonl", optim="muon", learning_rate=0.01, **settings)
    return model, build_optimizer(model, recipe, recipe.peak_learning_rate)


def test_matrices_of_layers_are_muons_and_all_else_that_trains_is_adamws():
    model, optimizer = built(weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model().square().sum().backward()
    optimizer.step()
    kept = {name: set(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}
    muons = {"layers.0.weight"}
    adamws = {"embed.weight", "layers.0.bias", "norm.weight", "norm.bias", "head.weight"}
    assert {name for name, keys in kept.items() if keys == {"momentum_buffer"}} == muons
    assert {name for name, keys in kept.items() if keys == {"step", "exp_avg", "exp_avg_sq"}} == adamws
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == muons | adamws
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays[id(model.norm.weight)] == 0 and decays[id(model.layers[0].weight)] == 0.1


def updated(kind, weight, gradients):
    parameter = nn.Parameter(weight.clone())
    optimizer = kind([parameter], **OPTIONS)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (5, 5)])
def test_its_bits_are_torchs(shape):
    weight, *gradients = (torch.randn(shape) for _ in range(4))
    assert torch.equal(updated(Muon, weight, gradients), updated(torch.optim.Muon, weight, gradients))
