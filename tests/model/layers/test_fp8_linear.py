"""FP8 matmuls are close to float32, independent for each token, and change nothing elsewhere."""

from copy import deepcopy

import torch
from model_helpers import hidden_and_gradients, small_llama

from kit.model.layers.fp8_linear import fp8_layers, install_fp8_linear, product

TINY = "recipes/tiny/model"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def error(one, other):
    """The relative error (Frobenius norm)."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def test_a_product_is_off_by_the_rounding_of_its_factors_whatever_the_size_of_numbers():
    for scale in (1e-30, 1.0, 1e30):
        left, right = random(40, 64) * scale, random(48, 64, seed=1)
        found = product(left, right)
        assert found.dtype == torch.bfloat16 and 0.02 < error(found, left.double() @ right.double().t()) < 0.05


def test_a_token_has_the_product_that_it_has_alone():
    left, right = random(40, 64) * 10.0 ** torch.arange(-20, 20)[:, None].bfloat16(), random(48, 64, seed=1)
    assert torch.equal(product(left, right)[7:11], product(left[7:11].clone(), right))
    assert product(left[:0], right).shape == (0, 48)


def test_rows_of_zeros_give_zeros_and_what_is_not_finite_stays_so():
    left, right = random(16, 32), random(16, 32, seed=1)
    left[0] = 0
    left[1, 3], left[2, 3] = torch.inf, torch.nan
    found = product(left, right)
    assert not found[0].any() and not found[1:3].isfinite().any() and found[3:].isfinite().all()


def models(**config):
    """A small Llama as it is, and a copy with products of 8 bits."""
    plain = small_llama(**config)
    ours = deepcopy(plain)
    install_fp8_linear(ours)
    return plain, ours


def test_hidden_states_and_gradients_are_near_those_of_float32():
    plain, ours = models(attention_bias=True)
    exact = hidden_and_gradients(plain, autocast=False, weights=random(64))
    found = hidden_and_gradients(ours, weights=random(64))
    errors = [error(one, other) for one, other in zip(found, exact, strict=True)]
    assert 0.02 < errors[0] < 0.08 and max(errors) < 0.15, errors


def test_without_bf16_every_bit_is_that_of_torch():
    plain, ours = (hidden_and_gradients(model, autocast=False) for model in models())
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))


def test_sizes_that_do_not_fit_the_head_and_what_selects_experts_stay_in_bf16():
    model, _ = models(intermediate_size=172)
    model.model.layers[1].mlp.gate = torch.nn.Linear(64, 16)
    takes, stays = fp8_layers(model)
    assert {name.rpartition(".")[2] for name, _ in takes} == {"q_proj", "k_proj", "v_proj", "o_proj"} and len(
        takes
    ) == 8
    assert len(stays) == 8 and "lm_head" in stays and "model.layers.1.mlp.gate" in stays
