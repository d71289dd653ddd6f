"""What a layer keeps for its backward pass is what autograd saves there."""

import pytest

from kit.memory.activations import kept
from kit.memory.workload import Workload
from kit.strategy.strategies import FSDP2, SINGLE
from kit.tools.plan.models import read_shape


@pytest.mark.slow
@pytest.mark.parametrize("how", ["autocast", "sharded", "lora", "eager", "compiled autocast", "compiled lora"])
def test_a_layer_keeps_what_autograd_saves(how, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from kit.model.compile import CompiledLayers
    from kit.model.lora_linear import install_lora_linear
    from kit.model.trained_linear import install_shared_casts, install_trained_linear

    is_compiled, how = how.startswith("compiled"), how.removeprefix("compiled ")
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=96,
        intermediate_size=208,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=28,
    )
    config._attn_implementation = "eager" if how == "eager" else "sdpa"
    config.save_pretrained(tmp_path)
    model = LlamaForCausalLM(config)
    if how == "lora":
        model = get_peft_model(model.bfloat16(), LoraConfig(r=3, target_modules="all-linear"))
        install_lora_linear(model)
        model = model.get_base_model()
    elif how in ("sharded", "eager"):
        model = model.bfloat16()
    else:
        install_shared_casts(model)
    if is_compiled:
        install_trained_linear(model)
        CompiledLayers(model, {"LlamaDecoderLayer"}).is_on = True
    num_tokens = 7
    layer = model.model.layers[1]
    states = torch.randn(1, num_tokens, 96, dtype=torch.float32 if how == "autocast" else torch.bfloat16)
    rotary = model.model.rotary_emb(states, torch.arange(num_tokens)[None])
    own = {p.untyped_storage()._cdata for p in model.parameters()} | {r.untyped_storage()._cdata for r in rotary}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own and num_tokens in tensor.shape:  # copies of weights have other sizes
            saved[storage._cdata] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        layer(states.requires_grad_(), position_embeddings=rotary)
    is_sharded = how in ("sharded", "eager")
    workload = Workload(
        shape=read_shape(tmp_path / "config.json", "tiny"),
        method="lora" if how == "lora" else "full",
        strategy=FSDP2 if is_sharded else SINGLE,
        num_gpus=8 if is_sharded else 1,
        lora_r=3,
        length=num_tokens,
        eager=how == "eager",
        fuses=is_compiled,
    )
    found = sum(size for size, _ in saved.values()) / num_tokens
    # A module's inputs may be kept in a view of the same storage twice over, so a byte or two a token may differ.
    assert kept(workload) == pytest.approx(found, rel=0.002)
