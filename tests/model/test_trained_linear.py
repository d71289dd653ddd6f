"""Trained float32 linear layers under autocast compute what torch's do, and keep no copy of their weights."""

from copy import deepcopy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kit.model.trained_linear import install_shared_casts, install_trained_linear


def models(**config):
    """A small Llama as it is, and a copy in which the function is installed."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 96}
    plain = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **config))
    ours = deepcopy(plain)
    install_trained_linear(ours)
    return plain, ours


def trained(model, autocast=True):
    """The hidden states, and all gradients."""
    ids = torch.arange(60).view(3, 20)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    hidden.float().pow(2).mean().backward()
    return [hidden, *(p.grad for p in model.model.parameters())]


def test_hidden_states_and_gradients_are_those_of_torch_bit_for_bit():
    for autocast in [True, False]:
        for has_bias in [True, False]:
            case = autocast, has_bias
            plain, ours = (trained(model, autocast) for model in models(attention_bias=has_bias, mlp_bias=has_bias))
            assert len(plain) == len(ours), case
            for one, other in zip(plain, ours, strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other), case


def test_a_shared_cast_changes_the_rounding_of_gradients_under_autocast_and_nothing_else():
    plain, ours = models()
    install_trained_linear(plain)
    install_shared_casts(ours)
    exact = trained(deepcopy(plain), autocast=False)
    assert all(map(torch.equal, trained(deepcopy(ours), autocast=False), exact))
    (hidden, *theirs), (same, *gradients) = trained(plain), trained(ours)
    assert torch.equal(hidden, same)
    for one, other, reference in zip(gradients, theirs, exact[1:], strict=True):
        errors = [(each - reference).norm() / reference.norm() for each in (one, other)]
        assert one.dtype == torch.float32 and errors[0] < 1.15 * errors[1]
