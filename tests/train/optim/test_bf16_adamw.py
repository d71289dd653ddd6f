"""What adamw_bf16 promises: no bias, torch's updates, and bits that depend on seed, step, weight and position only."""

import pytest
import torch
from torch import nn

from kit.train.optim.bf16_adamw import AdamWBF16, random_bits, stochastic_round

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def updated(weight, gradients, seed=0, **options):
    """The weight, and its state, after an update with each of the gradients."""
    parameter = nn.Parameter(weight.to(BF16))
    optimizer = AdamWBF16([{"params": [parameter]}], seed=seed, **{"lr": 1e-3, "weight_decay": 0.0} | options)
    for gradient in gradients:
        parameter.grad_dtype = None
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def test_the_mean_over_all_random_bits_is_the_exact_value():
    for value in [1.001, -1.001, 3.14159e-5, -7e20, 1e-39, 0.0]:
        noise = torch.arange(1 << 16, dtype=torch.int32)
        exact = torch.full((1 << 16,), value)
        rounded = stochastic_round(exact.clone(), noise)
        assert torch.equal(rounded, rounded.to(BF16).float()), value
        assert rounded.unique().numel() == (2 if value else 1), value
        assert abs(rounded.double().mean().item() - exact[0].double().item()) <= abs(value) * 2**-23, value


def test_updates_too_small_for_bf16_are_not_lost():
    """A step of 1e-4 is a fortieth of the distance between 1 and the next smaller number."""
    ones = torch.ones(4000)
    weight, _ = updated(ones, [ones] * 100, lr=1e-4)
    assert weight.float().mean().item() == pytest.approx(1 - 100 * 1e-4, abs=2e-4)


def test_each_weight_is_a_neighbour_of_the_one_of_torch():
    torch.manual_seed(0)
    weight, gradient = torch.randn(50, 30).to(BF16), torch.randn(50, 30)
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}
    exact = nn.Parameter(weight.float())
    exact.grad = gradient
    torch.optim.AdamW([exact], **options).step()
    found, _ = updated(weight, [gradient], **options)
    error = (found.float() - exact.detach()).abs()
    assert (error < exact.abs() * 2**-7).all() and error.any()


def test_bits_belong_to_a_position_of_the_whole_weight():
    key = (123, 2**32 - 1)
    for start in (0, 2**31 - 100, 2**32 + 5):
        whole = random_bits(key, start, 200, CPU)
        assert torch.equal(whole[150:180], random_bits(key, start + 150, 30, CPU))
        assert not torch.equal(whole, random_bits((124, 2**32 - 1), start, 200, CPU))
    bits = random_bits(key, 0, 100_000, CPU)
    assert bits.unique().numel() == len(bits)
    for shift in range(32):
        ones = (bits >> shift) & 1
        assert ones.float().mean().item() == pytest.approx(0.5, abs=0.01), shift
        assert (ones[1:] == ones[:-1]).float().mean().item() == pytest.approx(0.5, abs=0.01), shift
