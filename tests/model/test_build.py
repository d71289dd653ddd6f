"""One dtype rule, the same adapters everywhere, and mistakes reported before a weight is read."""

import pytest
import torch
from model_helpers import BF16, FP32, build, problems
from safetensors.torch import load_file
from transformers import BertConfig, T5Config, XLNetConfig

from kit.model.build import attention_of, build_meta_model, open_config
from kit.system.errors import UserError

# What the weights are


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "dtype"), [(BF16, torch.bfloat16), (FP32, torch.float32)], ids=["bf16", "fp32"])
def test_what_trains_is_in_float32_and_a_frozen_base_in_the_compute_dtype(recipe, model_folder, plan, dtype):
    """Also 4-bit weights are stored in it: sharding corrupts any other storage without a word."""
    full = build(recipe(method="full"), plan)
    assert {(p.dtype, p.requires_grad) for p in full.parameters()} == {(torch.float32, True)}
    stored = load_file(model_folder / "model.safetensors")
    assert all(torch.equal(tensor, full.state_dict()[name]) for name, tensor in stored.items())
    for method in ("lora", "qlora"):
        model = build(recipe(method=method), plan)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == ("lora_" in name), name
            assert parameter.dtype == (torch.float32 if "lora_" in name else dtype), name
        layers = [module for name, module in model.named_modules() if name.endswith("_proj.base_layer")]
        assert len(layers) == 3 * 7
        for layer in layers if method == "qlora" else ():
            assert layer.compute_dtype == dtype
            assert layer.weight.quant_state.quant_type == "nf4" and layer.weight.quant_state.nested


# What a user can get wrong


@pytest.mark.parametrize("config", [T5Config(), BertConfig(), XLNetConfig()])
def test_an_encoder_is_no_causal_language_model(recipe, changed, config):
    with pytest.raises(UserError, match="not a causal language model"):
        build_meta_model(recipe(changed()), config)


def test_a_folder_without_weights_is_refused(recipe, changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    assert "no weights in" in problems(recipe(folder))


def test_a_quantised_checkpoint_is_refused(recipe, changed):
    folder = changed(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert "a quantised checkpoint" in problems(recipe(folder))


def test_a_family_without_sdpa_gets_eager_attention_unless_sdpa_is_asked_for(recipe, changed):
    from transformers import Gemma2Config

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = changed(**Gemma2Config(**shape, head_dim=8, intermediate_size=64, vocab_size=320).to_dict())
    for mine in (recipe(folder), recipe(folder, packing=True)):
        assert attention_of(mine, open_config(mine), mine.packing) == "eager" and problems(mine) == ""
    with pytest.raises(UserError, match="sdpa") as caught:
        problems(recipe(folder, attn_implementation="sdpa"))
    assert "error: attn_implementation: " in str(caught.value) and "--attn_implementation auto" in str(caught.value)


def test_a_part_without_sdpa_gets_eager_attention_and_the_text_keeps_sdpa(recipe, changed):
    """Gemma 4's audio encoder: with sdpa for all parts, its E2B and E4B could not be opened."""
    from transformers import Gemma4AudioConfig, Gemma4Config, Gemma4TextConfig

    text = Gemma4TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        vocab_size=320,
        vocab_size_per_layer_input=320,
        hidden_size_per_layer_input=8,
    )
    audio = Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, output_proj_dims=16)
    config = Gemma4Config(text_config=text, audio_config=audio, vision_config=None)
    mine = recipe(changed(**config.to_dict()))
    model = build_meta_model(mine, open_config(mine))
    assert model.config._attn_implementation == model.config.text_config._attn_implementation == "sdpa"
    assert model.config.audio_config._attn_implementation == "eager" and problems(mine) == ""
