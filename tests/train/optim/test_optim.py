"""Which weights the optimiser moves, which of them decay, and at which rates."""

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from kit.config.optimisers import OPTIMISERS
from kit.config.recipe import Recipe
from kit.model.adapters.adapter import attach_adapter
from kit.train.optim import optim

KINDS = sorted({*OPTIMISERS} - {"adamw_bf16", "muon"})  # with tests of their own


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


def test_norms_and_biases_do_not_decay():
    """Without a gradient only decay moves a weight: by ``rate x decay`` of itself."""
    for kind in KINDS:
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


def test_each_group_keeps_its_factor_of_the_schedule():
    """Without a gradient only decay moves a weight: by ``rate x decay`` of itself."""
    for kind in KINDS:
        layers = model()
        settings = recipe(optim=kind, weight_decay=0.5, learning_rate=0.3)
        optimizer = build_optimizer(layers, settings)
        slow, fast = layers[0].weight, layers[1].weight
        optimizer.param_groups[0]["params"] = [slow]
        optimizer.add_param_group({"params": [fast], "weight_decay": 0.5, "lr": 0.1})
        (line,) = optim.keep_lr_multipliers(optimizer, settings.peak_learning_rate)
        assert line == "learning rate: the schedule's x 1 for 80, x 0.333333 for 64 trainable parameters", kind
        for rate in (0.2, 0.04):
            before = slow.detach().clone(), fast.detach().clone()
            for parameter in layers.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optim.set_learning_rate(optimizer, rate)
            optimizer.step()
            assert torch.allclose(slow, before[0] * (1 - rate * 0.5)), kind
            assert torch.allclose(fast, before[1] * (1 - rate / 3 * 0.5)), kind


def adapted(**changes):
    """An adapted model with a trained embedding, and its recipe."""
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9, pad_token_id=0
    )
    settings = recipe(learning_rate=1e-3, lora_r=2, **changes)
    return attach_adapter(LlamaForCausalLM(config), settings), settings


def rates_of(optimizer, model):
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: rates[p] for name, p in model.named_parameters() if p.requires_grad}


def test_lora_plus_gives_each_matrix_the_rate_that_peft_gives_it():
    layers, settings = adapted(loraplus_lr_ratio=16.0, use_dora=True)
    theirs = create_loraplus_optimizer(layers, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)
    assert rates_of(build_optimizer(layers, settings), layers) == rates_of(theirs, layers)


def test_embedding_and_head_have_their_own_rate_with_any_method():
    layers, settings = adapted(
        embedding_learning_rate=1e-4, loraplus_lr_ratio=4, lora_modules_to_save="embed_tokens,lm_head"
    )
    for name, rate in rates_of(build_optimizer(layers, settings), layers).items():
        of_table = "embed_tokens" in name or "lm_head" in name
        assert rate == (1e-4 if of_table else 4e-3 if "lora_B" in name else 1e-3)
    layers, settings = adapted(embedding_learning_rate=1e-4, method="full")
    slow = {name for name, rate in rates_of(build_optimizer(layers, settings), layers).items() if rate == 1e-4}
    assert slow == {"model.embed_tokens.weight", "lm_head.weight"}
