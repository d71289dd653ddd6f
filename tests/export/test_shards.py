"""What is written reloads in plain transformers with the same logits, in one file or in many."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kit.export import shards
from kit.export.final import write_model
from kit.strategy.weights import whole_state

IDS = torch.tensor([[1, 40, 50, 60, 7, 9]])
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT = {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT |= {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def tiny(kind, **changes):
    """A model with random weights and random buffers."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    values = {**SHAPE, **changes}
    if kind in ("deepseek_v3", "mixtral"):
        values |= EXPERTS | (LATENT if kind == "deepseek_v3" else {})
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
@pytest.mark.parametrize(
    ("kind", "buffer"),
    [("apertus", "act_fn"), ("deepseek_v3", "e_score_correction_bias"), ("mixtral", ""), ("llama", "")],
)
def test_a_reloaded_model_has_the_same_logits(tmp_path, kind, buffer):
    """With buffers that decide what it answers; with experts that are stored in other tensors than they are held in."""
    model = tiny(kind)
    names = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    assert any(buffer in name for name in names) == bool(buffer)
    with torch.no_grad():
        assert torch.equal(written(model, tmp_path / "a")(IDS).logits, model(IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_several_files_open_like_a_single_one(tmp_path, monkeypatch, tied):
    model = tiny("llama", tie_word_embeddings=tied)
    written(model, tmp_path / "one")
    whole = load_file(tmp_path / "one/model.safetensors")
    assert ("lm_head.weight" in whole) != tied
    monkeypatch.setattr(shards, "MAX_SHARD_BYTES", 10_000)  # the embeddings alone are larger
    again = written(model, tmp_path / "many")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    for file in files:
        with safe_open(tmp_path / "many" / file, "pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 10_000 or len(sizes) == 1


def test_weights_are_cast_and_buffers_are_not(tmp_path):
    again = written(tiny("apertus"), tmp_path / "a", torch.bfloat16)
    assert again.dtype == torch.bfloat16
    stored = load_file(tmp_path / "a/model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    buffers = {name for name, _ in again.named_buffers()} & kinds.keys()
    assert buffers and all(kinds[name] == (torch.float32 if name in buffers else torch.bfloat16) for name in kinds)
    assert json.loads((tmp_path / "a/config.json").read_text())["dtype"] == "bfloat16"
