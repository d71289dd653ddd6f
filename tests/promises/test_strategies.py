"""HSDP with four ranks in two replicas, and persistent buffers."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import ApertusConfig, ApertusForCausalLM


@pytest.mark.slow
def test_a_model_with_buffers_is_sharded_and_saved_with_them(finetune, fp32, model_folder, tmp_path):
    """Rank 0 sends them with the weights; checkpoints and final/ have them, whatever of the model trains."""
    base = shutil.copytree(model_folder, tmp_path / "base")
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = ApertusForCausalLM(ApertusConfig(vocab_size=320, pad_token_id=0, **heads, **shape))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    assert buffers
    for buffer in buffers.values():
        buffer.copy_(torch.rand_like(buffer) + 0.5)
    model.save_pretrained(base)
    losses = {}
    for config, processes in (("single", 1), ("fsdp", 2)):
        flags = {"model_name_or_path": base, "method": "full", "config": fp32[config], "save_only_model": "true"}
        run = finetune.ok(config, processes, max_steps=3, **flags)
        final = load_file(run.folder / "final/model.safetensors")
        assert all(torch.equal(final[name].view_as(buffer), buffer) for name, buffer in buffers.items())
        losses[config] = [row["loss"] for row in run.rows if "loss" in row]
    assert losses["single"] == pytest.approx(losses["fsdp"], rel=1e-6)
    refused = finetune("single", max_steps=4, **flags | {"config": fp32["single"]})
    assert refused.status == 2 and "step-00000003 holds weights only" in refused.output
