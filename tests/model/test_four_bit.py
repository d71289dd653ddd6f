"""4-bit weights quantised on one device and stored on another, and meta models that receive them."""

from dataclasses import replace

import bitsandbytes
import pytest
import torch
from model_helpers import BF16, FP32, build


def forms(model):
    """The shapes of parameters, the dtypes of 4-bit weights, and their tables with what else their state holds."""
    packed = bitsandbytes.nn.Params4bit
    found = {name: (p.shape, p.dtype if isinstance(p, packed) else None) for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        state = getattr(module, "quant_state", None)
        for owner in (state, getattr(state, "state2", None)):
            for key, value in vars(owner).items() if owner else ():
                form = (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
                found[f"{name} {owner is state} {key}"] = None if key == "state2" else form
    return found


@pytest.mark.parametrize("plan", [BF16, FP32])
def test_a_rank_without_weights_builds_what_the_one_with_weights_has(recipe, plan):
    mine = recipe(method="qlora")
    read, empty = build(mine, plan), build(mine, replace(plan, reads_weights=False))
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert forms(empty) == forms(read)
    assert any(isinstance(p, bitsandbytes.nn.Params4bit) for p in empty.parameters())
