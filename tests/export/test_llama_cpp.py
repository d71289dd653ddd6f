"""``final/`` and an adapter hold what the converters of llama.cpp read."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kit.config.recipe import Recipe
from kit.export.final import write_model
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer


@pytest.mark.slow
def test_final_has_what_the_converters_of_llama_cpp_read(model_folder, tmp_path):
    """Names of tensors, keys of configs and files of the tokenizer, as the formats of Llama and of PEFT have them."""
    layer = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for method in ("full", "lora"):
        recipe = Recipe(model_name_or_path=str(model_folder), dataset="x.jsonl", method=method)
        tokenizer, config = open_tokenizer(recipe), open_config(recipe)
        model = build_model(recipe, config, LoadPlan(compute_dtype="float32", device="cpu"))
        state = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        state |= {name: torch.ones_like(tensor) for name, tensor in state.items() if "lora_B" in name}
        write_model(tmp_path / method, model, state, tokenizer, "", config.dtype)

    names = set(load_file(tmp_path / "full/model.safetensors"))
    norms = {"input_layernorm", "post_attention_layernorm"}
    layers = {f"model.layers.{i}.{name}.weight" for i in range(3) for name in layer | norms}
    assert names == layers | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    values = json.loads((tmp_path / "full/config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLM"] and values["model_type"] == "llama"
    sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    assert all(isinstance(values[key], int) for key in (*sizes.split(), "max_position_embeddings"))
    assert values["rms_norm_eps"] > 0 and values["rope_parameters"]["rope_theta"] > 0

    names = set(load_file(tmp_path / "lora/adapter_model.safetensors"))
    start = "base_model.model.model.layers"
    assert names == {f"{start}.{i}.{m}.lora_{ab}.weight" for i in range(3) for m in layer for ab in "AB"}
    values = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    assert values["peft_type"] == "LORA" and values["lora_alpha"] == 32 and values["r"] == 16
    assert values["base_model_name_or_path"] and not values["use_rslora"] and values["modules_to_save"] is None

    for folder in ("full", "lora"):
        tokens = json.loads((tmp_path / folder / "tokenizer.json").read_text())
        assert tokens["model"]["type"] == "BPE" and tokens["model"]["vocab"] and tokens["model"]["merges"]
        settings = json.loads((tmp_path / folder / "tokenizer_config.json").read_text())
        assert settings["eos_token"] == "<|im_end|>"
        assert (tmp_path / folder / "chat_template.jinja").is_file()
