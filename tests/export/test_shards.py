"""A full model that is written reloads in plain transformers with the same logits, in one file or in many."""

import errno
import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kit.export import final
from kit.export.final import write_model
from kit.strategy.weights import whole_state

IDS = torch.tensor([[1, 40, 50, 60, 7, 9]])
SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}


def tiny(kind, **changes):
    """A model with random weights and random buffers."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    values = {**SHAPE, **changes} | (EXPERTS if kind == "mixtral" else {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


def written(model, folder, dtype=torch.float32):
    folder.mkdir()
    write_model(folder, model, whole_state(model), NoTokenizer(), "card", dtype)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tied"), [("apertus", False), ("mixtral", False), ("llama", False), ("llama", True)])
def test_a_reloaded_model_has_the_same_logits(tmp_path, monkeypatch, kind, tied):
    """With buffers that decide what it answers; with experts that are stored in other tensors than they are held in."""
    monkeypatch.setattr(final, "MAX_SHARD_BYTES", 10_000)  # the embeddings alone are larger
    model = tiny(kind, tie_word_embeddings=tied)
    again = written(model, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    files = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(files.values())) > 3 and ("lm_head.weight" in files) != tied


def test_weights_are_cast_and_buffers_are_not(tmp_path):
    again = written(tiny("apertus"), tmp_path / "a", torch.bfloat16)
    assert again.dtype == torch.bfloat16
    kinds = {name: tensor.dtype for name, tensor in load_file(tmp_path / "a/model.safetensors").items()}
    buffers = {name for name, _ in again.named_buffers()} & kinds.keys()
    assert buffers and all(kinds[name] == (torch.float32 if name in buffers else torch.bfloat16) for name in kinds)
    assert json.loads((tmp_path / "a/config.json").read_text())["dtype"] == "bfloat16"


def test_a_full_disk_is_known_for_one(tmp_path, monkeypatch):
    """safetensors hides the number of the error, by which a run that ends says so."""
    model = tiny("llama")

    def fail(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(OSError) as caught:
        write_model(tmp_path, model, whole_state(model), NoTokenizer(), "card", None)
    assert caught.value.errno == errno.ENOSPC
