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


def test_no_copy_of_a_weight_is_kept_for_the_backward_pass():
    def kept_bytes(model):
        kept, parameters = {}, {p.data_ptr() for p in model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trained(model)
        return sum(kept.values())

    plain, ours = models()
    weights = sum(m.weight.numel() for m in plain.model.modules() if isinstance(m, torch.nn.Linear))
    assert kept_bytes(plain) - kept_bytes(ours) == 2 * weights


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


def test_layers_that_read_one_input_keep_one_cast_of_it():
    """In a layer, of five casts of 64 values in bf16 two are left."""

    def num_casts(model):
        casts = set()

        def pack(tensor):
            if tensor.shape[-1] == 64 and tensor.dtype == torch.bfloat16 and tensor.numel() == 60 * 64:
                casts.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trained(model)
        return len(casts)

    plain, ours = models()
    install_shared_casts(ours)
    assert num_casts(plain) - num_casts(ours) == 2 * 3


def test_a_layer_compiles_to_one_graph_with_the_same_gradients():
    plain, ours = models()
    for model in (plain, ours):
        install_shared_casts(model)
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for one, other in zip(trained(plain), trained(ours), strict=True):
        assert torch.equal(one, other)


def test_frozen_layers_and_the_head_keep_their_own_forward():
    plain, _ = models()
    frozen = plain.model.layers[0].mlp.up_proj
    frozen.weight.requires_grad_(False)
    install_trained_linear(plain)
    assert "forward" not in vars(frozen) and "forward" not in vars(plain.lm_head)
    assert "forward" in vars(plain.model.layers[0].mlp.down_proj)
