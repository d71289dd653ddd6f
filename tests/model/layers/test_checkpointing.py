"""Activation checkpointing changes no bit; the selective one recomputes no wide matrix product."""

from collections import Counter

import pytest
import torch
from model_helpers import BF16, FP32, build, learned
from torch.utils._python_dispatch import TorchDispatchMode

from kit.config.recipe import Recipe
from kit.model.layers.checkpointing import NARROW, enable_checkpointing
from kit.system.errors import UserError

TINY = "recipes/tiny/model"  # wider than NARROW, so that its products are kept


class Counted(TorchDispatchMode):
    """Counts operations by name; of matrix products the wide ones, by their results' width."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if "attention" in name or name == "gemm_4bit":
            self.calls[name] += 1
        elif name in ("mm", "addmm") and result.shape[-1] > NARROW < args[0].shape[-1]:
            self.calls["product"] += 1
        return result


def trained(how, plan=FP32, autocast=False, dropout=0.0, **settings):
    """The losses of one batch and all gradients, and what was computed."""
    recipe = Recipe(model_name_or_path=TINY, dataset="x.jsonl", max_length=64, gradient_checkpointing=how, **settings)
    model = build(recipe, plan)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    with Counted() as counted:
        found = learned(model, autocast)
    return found, counted.calls


CASES = {
    "full": {"method": "full"},
    "full in bf16": {"method": "full", "plan": BF16, "autocast": True},
    "lora": {"method": "lora"},
    "lora with dropout in bf16": {"method": "lora", "lora_dropout": 0.3, "plan": BF16, "autocast": True},
    "qlora": {"method": "qlora", "plan": BF16, "autocast": True},
    "attention with dropout": {"method": "lora", "dropout": 0.3},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_without_checkpointing_bit_for_bit(case):
    expected, without = trained(False, **CASES[case])
    again = {}
    for how in (True, "selective"):
        found, again[how] = trained(how, **CASES[case])
        assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected), how
    products = ("product", "gemm_4bit")
    assert sum(again[True][name] for name in products) >= sum(without[name] for name in products) + 6 * 4  # layers
    if case == "attention with dropout":
        return  # it is computed again, since it draws random numbers
    assert again["selective"] == without  # nothing before the first adapter is computed backward either


class Layer(torch.nn.Module):
    """A layer that changes the result of its product in place."""

    supports_gradient_checkpointing = True

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = torch.nn.Linear(2 * NARROW, 2 * NARROW, bias=False), change

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
        self.checkpoint = gradient_checkpointing_kwargs

    def disable_input_require_grads(self):
        """As of a model of transformers."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(lambda x: self.change(self.linear(x)).exp(), x, **self.checkpoint)


def test_a_part_that_is_added_to_a_product_in_place_is_added_once():
    part = torch.randn(3, 2 * NARROW)
    layer = Layer(lambda y: y.add_(part))
    x = torch.randn(3, 2 * NARROW)
    gradients = []
    for how in (True, "selective"):
        enable_checkpointing(layer, how)
        layer.zero_grad()
        layer(x).sum().backward()
        gradients.append(layer.linear.weight.grad)
    assert gradients[0].equal(gradients[1])


def test_another_change_in_place_is_refused():
    layer = Layer(lambda y: y.mul_(2.0))
    enable_checkpointing(layer, "selective")
    with pytest.raises(UserError, match=r"in place \(aten.mul_"):
        layer(torch.randn(3, 2 * NARROW))


def test_a_model_without_checkpointing_says_so(capsys):
    layer = Layer(lambda y: y)
    layer.supports_gradient_checkpointing = False
    enable_checkpointing(layer, False)
    assert not capsys.readouterr().out
    enable_checkpointing(layer, True)
    assert "gradient_checkpointing: Layer has none" in capsys.readouterr().out
