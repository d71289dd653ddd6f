"""A model in which the samples of a pack see each other is refused before it learns anything."""

import pytest
import torch
from accelerate import Accelerator
from transformers import JambaConfig, JambaForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from kit.data.feed.ranks import Ranks
from kit.errors import UserError
from kit.model import attention
from kit.model.loss_head import install_loss_head
from kit.strategy.accelerator import Prepared
from kit.train.isolation import check_isolation

SHAPE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def random_model(kind, config, implementation, size=5.0):
    """A random model; with ``size`` 5 its weights are large enough for a leak to be seen in the losses."""
    attention.register_varlen()
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= size if parameter.dim() > 1 else 1
    install_loss_head(model)
    return model


def check(model):
    check_isolation(Prepared(Accelerator(cpu=True), Ranks(), model, None, None), 100)


@pytest.mark.parametrize("implementation", ["sdpa", attention.VARLEN, "eager"])
def test_a_llama_keeps_the_samples_of_a_pack_apart(implementation):
    model = random_model(LlamaForCausalLM, LlamaConfig(**SHAPE, intermediate_size=64), implementation)
    check(model)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_a_family_that_builds_no_mask_from_positions_is_refused_but_with_varlen():
    config = OPTConfig(**SHAPE, word_embed_proj_dim=32, ffn_dim=64)
    with pytest.raises(UserError, match="packing: samples of a pack see each other in this model"):
        check(random_model(OPTForCausalLM, config, "sdpa"))
    check(random_model(OPTForCausalLM, config, attention.VARLEN))


@pytest.mark.parametrize("implementation", ["sdpa", attention.VARLEN])
def test_recurrent_layers_are_refused_under_any_attention(implementation):
    config = JambaConfig(
        **SHAPE, intermediate_size=64, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
        use_mamba_kernels=False,
    )  # fmt: skip
    with pytest.raises(UserError, match="packing: samples of a pack see each other in this model"):
        check(random_model(JambaForCausalLM, config, implementation))


def test_a_leak_too_small_for_the_losses_is_refused_by_its_gradient():
    config = JambaConfig(
        **SHAPE, intermediate_size=64, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
        use_mamba_kernels=False,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"samples of a pack see each other in this model \(a gradient passes\)"):
        check(random_model(JambaForCausalLM, config, "sdpa", size=0.5))
