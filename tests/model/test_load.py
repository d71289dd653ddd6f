"""One dtype rule, the same adapters everywhere, and mistakes reported before a weight is read."""

from contextlib import suppress

import pytest
import torch
from model_helpers import BF16, FP32, build, problems
from safetensors.torch import load_file
from transformers import BertConfig, T5Config, XLNetConfig

from kit.errors import UserError
from kit.model.load import attention_of, build_meta_model, open_config
from kit.model.tokenizer import open_tokenizer

# What the weights are


@pytest.mark.parametrize("plan", [BF16, FP32], ids=["bf16", "fp32"])
def test_full_trains_every_weight_in_float32(recipe, plan, model_folder):
    model = build(recipe(method="full"), plan)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    stored = load_file(model_folder / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "frozen"), [(BF16, torch.bfloat16), (FP32, torch.float32)], ids=["bf16", "fp32"])
def test_lora_trains_float32_adapters_on_a_base_in_the_compute_dtype(recipe, plan, frozen):
    model = build(recipe(method="lora"), plan)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype == (torch.float32 if "lora_" in name else frozen), name
    targets = {name.split(".lora_A")[0].rsplit(".", 1)[1] for name, _ in model.named_parameters() if "lora_A" in name}
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "storage"), [(BF16, torch.bfloat16), (FP32, torch.float32)], ids=["bf16", "fp32"])
def test_qlora_stores_nf4_with_double_quantisation_in_the_compute_dtype(recipe, plan, storage):
    """Sharding corrupts any other storage without a word."""
    import bitsandbytes

    model = build(recipe(method="qlora"), plan)
    layers = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 3 * 7
    for layer in layers:
        state = layer.weight.quant_state
        assert (layer.weight.dtype, layer.compute_dtype) == (storage, storage)
        assert state.quant_type == "nf4" and state.nested
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype == (torch.float32 if "lora_" in name else storage), name


# What a user can get wrong


def test_a_config_that_is_no_json_or_of_no_known_type_is_a_users_mistake(recipe, changed):
    folder = changed(model_type="lama")
    with pytest.raises(UserError, match="lama"):
        open_config(recipe(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="model_name_or_path"):
        open_config(recipe(folder))


@pytest.mark.parametrize("config", [T5Config(), BertConfig(), XLNetConfig()])
def test_an_encoder_is_no_causal_language_model(recipe, changed, config):
    with pytest.raises(UserError, match="not a causal language model"):
        build_meta_model(recipe(changed()), config)


def test_pickled_weights_are_refused_and_named(recipe, changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    assert "no weights in" in problems(recipe(folder))
    torch.save({}, folder / "pytorch_model.bin")
    text = problems(recipe(folder))
    assert "pytorch_model.bin" in text and "*.safetensors" in text and "never opened" in text


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


# Code that comes with a model

OWN_CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
pathlib.Path({path!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own_type"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def booby_trap(changed, tmp_path):
    """A model folder whose config, model and tokenizer point to code; returns it and the file that code makes."""
    canary = tmp_path / "executed"

    def make(model_type):
        own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        folder = changed(model_type=model_type, auto_map=own)
        changed(
            "tokenizer_config.json",
            tokenizer_class="OwnTokenizer",
            auto_map={"AutoTokenizer": ["own.OwnTokenizer"] * 2},
        )
        (folder / "own.py").write_text(OWN_CODE.format(path=str(canary)))
        return folder, canary

    return make


@pytest.mark.parametrize("model_type", ["llama", "own_type"])
def test_code_that_comes_with_a_model_is_not_executed(recipe, booby_trap, model_type):
    folder, canary = booby_trap(model_type)
    mine = recipe(folder)
    with suppress(UserError):
        open_tokenizer(mine)
    with suppress(UserError):
        build_meta_model(mine, open_config(mine))
    with suppress(UserError):
        build(mine, FP32)
    assert not canary.exists()


def test_code_is_executed_with_trust_remote_code(recipe, booby_trap):
    """The trap works: without this the test above proves nothing."""
    folder, canary = booby_trap("own_type")
    open_config(recipe(folder, trust_remote_code=True))
    assert canary.exists()
