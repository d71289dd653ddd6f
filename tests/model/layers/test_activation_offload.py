"""Losses and gradients with activation offload equal those without it, bit for bit."""

import pytest
import torch
from model_helpers import BF16, FP32, build

from kit.config.recipe import Recipe


def trained(offloads, plan, **settings):
    """The losses of two micro-batches of different lengths, and the gradients."""
    values = {"gradient_checkpointing": True, "activation_offload": offloads, **settings}
    model = build(Recipe(model_name_or_path="recipes/tiny/model", dataset="x.jsonl", **values), plan)
    losses = []
    for seed, length in enumerate((40, 23)):
        inputs = torch.arange(2 * length).reshape(2, length) * 7 % 1000
        positions = torch.arange(0, 2 * length, 3)
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=plan is BF16):
            losses.append(model(input_ids=inputs, target_positions=positions, targets=positions))
    for each in reversed(losses):  # both graphs are there at once
        each.sum().backward()
    return [each.detach() for each in losses] + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (FP32, {"method": "full"}),
        (FP32, {"method": "lora", "gradient_checkpointing": "selective", "lora_dropout": 0.3}),
        (BF16, {"method": "qlora"}),
    ],
    ids=["full", "lora, selective", "qlora"],
)
def test_losses_and_gradients_are_the_same_bit_for_bit(plan, settings):
    expected, found = (trained(offloads, plan, **settings) for offloads in (False, True))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
