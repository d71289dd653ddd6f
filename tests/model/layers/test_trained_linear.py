"""Trained float32 linear layers under autocast compute what torch's do, and keep no copy of their weights."""

from copy import deepcopy

import torch
from model_helpers import hidden_and_gradients, small_llama
from torch.utils._python_dispatch import TorchDispatchMode

from kit.model.layers.trained_linear import install_shared_casts, install_trained_linear


def models(**config):
    """A small Llama as it is, and a copy in which the function is installed."""
    plain = small_llama(**config)
    ours = deepcopy(plain)
    install_trained_linear(ours)
    return plain, ours


def test_hidden_states_and_gradients_are_those_of_torch_bit_for_bit():
    for autocast in [True, False]:
        for has_bias in [True, False]:
            case = autocast, has_bias
            plain, ours = (
                hidden_and_gradients(model, autocast) for model in models(attention_bias=has_bias, mlp_bias=has_bias)
            )
            assert len(plain) == len(ours), case
            for one, other in zip(plain, ours, strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other), case


def test_a_shared_cast_changes_the_rounding_of_gradients_under_autocast_and_nothing_else():
    plain, ours = models()
    install_trained_linear(plain)
    install_shared_casts(ours)
    exact = hidden_and_gradients(deepcopy(plain), autocast=False)
    assert all(map(torch.equal, hidden_and_gradients(deepcopy(ours), autocast=False), exact))
    (hidden, *theirs), (same, *gradients) = hidden_and_gradients(plain), hidden_and_gradients(ours)
    assert torch.equal(hidden, same)
    for one, other, reference in zip(gradients, theirs, exact[1:], strict=True):
        errors = [(each - reference).norm() / reference.norm() for each in (one, other)]
        assert one.dtype == torch.float32 and errors[0] < 1.15 * errors[1]


class _CastsOfWeights(TorchDispatchMode):
    """Counts the copies of two-dimensional float32 tensors in another dtype."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func is torch.ops.aten._to_copy.default and args[0].ndim == 2 and args[0].dtype == torch.float32
        self.number += is_cast
        return func(*args, **(kwargs or {}))


def test_without_gradients_and_with_autocasts_cache_as_in_generation_a_weight_is_cast_once():
    _, model = models()
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(1, 3, layer.in_features)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        wanted = layer(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=True), _CastsOfWeights() as casts:
        assert all(torch.equal(layer(x), wanted) for _ in range(3)) and casts.number == 1
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True), _CastsOfWeights() as casts:
        assert all(torch.equal(layer(x), wanted) for _ in range(3)) and casts.number == 3  # none is kept for autograd
