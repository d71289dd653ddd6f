"""One dtype rule, the same adapters everywhere, and mistakes told before a weight is read."""

import json
import shutil
from contextlib import suppress

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.model.adapter import attach_adapter
from kit.model.load import build_meta_model, build_model, check_model, open_config, open_tokenizer
from kit.model.plan import LoadPlan

BF16 = LoadPlan(compute_dtype="bfloat16", device="cpu")
FP32 = LoadPlan(compute_dtype="float32", device="cpu")


@pytest.fixture
def recipe(model_folder):
    def recipe(folder=model_folder, **changes):
        return Recipe(**{"model_name_or_path": str(folder), "dataset": "x.jsonl", "max_length": 256, **changes})

    return recipe


def build(recipe, plan):
    return build_model(recipe, open_config(recipe), plan)


def problems(recipe):
    """As the script collects them, as one text."""
    config = open_config(recipe)
    return "\n".join(map(str, check_model(recipe, config, build_meta_model(recipe, config))))


@pytest.fixture
def changed(model_folder, tmp_path):
    """A copy of the model's folder, with other values in one of its JSON files."""

    def changed(file="config.json", **values):
        folder = tmp_path / "changed"
        if not folder.exists():
            shutil.copytree(model_folder, folder)
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    return changed


# What the weights are


@pytest.mark.parametrize("plan", [BF16, FP32], ids=["bf16", "fp32"])
def test_full_trains_every_weight_in_float32(recipe, plan, model_folder):
    model = build(recipe(method="full"), plan)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    stored = load_file(model_folder / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())


@pytest.mark.parametrize(("plan", "frozen"), [(BF16, torch.bfloat16), (FP32, torch.float32)], ids=["bf16", "fp32"])
def test_lora_trains_float32_adapters_on_a_base_in_the_compute_type(recipe, plan, frozen):
    model = build(recipe(method="lora"), plan)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype == (torch.float32 if "lora_" in name else frozen), name
    targets = {name.split(".lora_A")[0].rsplit(".", 1)[1] for name, _ in model.named_parameters() if "lora_A" in name}
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(("plan", "storage"), [(BF16, torch.bfloat16), (FP32, torch.float32)], ids=["bf16", "fp32"])
def test_qlora_stores_nf4_with_double_quantisation_in_the_compute_type(recipe, plan, storage):
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


def test_the_seed_alone_decides_the_first_adapters(recipe):
    """Not what ran before: sharding takes each rank's part of what must be one matrix."""

    def adapters(seed):
        torch.rand(7)
        model = build(recipe(method="lora", seed=seed), FP32)
        return {name: p for name, p in model.named_parameters() if "lora_" in name}

    first, second, other = adapters(1), adapters(1), adapters(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    assert not any(p.any() for name, p in first.items() if "lora_B" in name)  # starts as the base model


@pytest.mark.parametrize(("r", "alpha", "rslora", "scale"), [(4, 8, False, 2.0), (16, 8, True, 2.0)])
def test_rank_and_scale_are_those_of_the_recipe(recipe, r, alpha, rslora, scale):
    model = build(recipe(lora_r=r, lora_alpha=alpha, use_rslora=rslora, lora_target_modules="q_proj,v_proj"), FP32)
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert len(layers) == 3 * 2
    assert {layer.scaling["default"] for layer in layers} == {scale}
    assert {layer.r["default"] for layer in layers} == {r}


def test_an_adapter_goes_on_with_its_own_shape(recipe, tmp_path):
    first = build(recipe(lora_r=3, lora_target_modules="q_proj"), FP32)
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    first.save_pretrained(tmp_path / "adapter")
    again = build(recipe(adapter_name_or_path=str(tmp_path / "adapter")), BF16)
    trained = {name: p for name, p in again.named_parameters() if p.requires_grad}
    expected = {name: p for name, p in first.named_parameters() if p.requires_grad}
    assert set(trained) == set(expected)
    assert all(p.dtype == torch.float32 and torch.equal(p, expected[name]) for name, p in trained.items())


def test_the_dry_run_counts_the_adapters_that_will_train(recipe):
    mine = recipe(lora_r=5)
    meta = attach_adapter(build_meta_model(mine, open_config(mine)), mine)
    count = sum(p.numel() for p in meta.parameters() if p.requires_grad)
    assert count == sum(p.numel() for p in build(mine, FP32).parameters() if p.requires_grad)
    assert all(p.device.type == "meta" for p in meta.parameters())


# What a user can get wrong


def test_a_fitting_recipe_has_no_problems(recipe):
    assert problems(recipe(method="qlora", lora_target_modules="q_proj,mlp.down_proj,lm_head")) == ""


def test_a_missing_folder_is_named(recipe, tmp_path):
    with pytest.raises(UserError, match=r"model_name_or_path: .*/nowhere: no such folder"):
        open_config(recipe(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no config\.json in it"):
        open_config(recipe(tmp_path))


def test_a_config_that_is_no_json_or_of_no_known_type_is_a_users_mistake(recipe, changed):
    folder = changed(model_type="lama")
    with pytest.raises(UserError, match="lama"):
        open_config(recipe(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="model_name_or_path"):
        open_config(recipe(folder))


def test_an_encoder_is_no_causal_language_model(recipe, changed):
    mine = recipe(changed(model_type="t5"))
    with pytest.raises(UserError, match="not a causal language model"):
        build_meta_model(mine, open_config(mine))


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


def test_a_mistyped_target_module_gets_a_hint(recipe):
    text = problems(recipe(lora_target_modules="q_porj,v_proj,nothing_like_it"))
    assert "no module 'q_porj'" in text and "did you mean 'q_proj'?" in text
    assert "no module 'nothing_like_it'" in text and "down_proj" in text
    assert "'v_proj'" not in text
    assert problems(recipe(method="full", lora_target_modules="q_porj")) == ""  # not looked at


def test_a_length_beyond_the_models_positions_is_refused_with_the_longest(recipe):
    assert "--max_length 1024" in problems(recipe(max_length=1025))
    assert problems(recipe(max_length=1024)) == ""


def test_an_adapter_folder_must_hold_an_adapter(recipe, tmp_path):
    text = problems(recipe(adapter_name_or_path=str(tmp_path)))
    assert "adapter_config.json" in text and "adapter_model.safetensors" in text


@pytest.fixture
def adapter(recipe, tmp_path):
    """A saved LoRA of rank 3, with other settings where given."""

    def adapter(**settings):
        build(recipe(lora_r=3, **settings), FP32).save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return adapter


def test_an_adapter_that_fits_is_checked_without_a_trace(recipe, adapter):
    for settings in ({}, {"use_dora": True}, {"lora_target_modules": "embed_tokens,q_proj,lm_head"}):
        mine = recipe(adapter_name_or_path=str(adapter(**settings)))
        config = open_config(mine)
        meta_model = build_meta_model(mine, config)
        before = [name for name, _ in meta_model.named_parameters()]
        assert check_model(mine, config, meta_model) == []
        assert [name for name, _ in meta_model.named_parameters()] == before
        attach_adapter(meta_model, mine)


@pytest.mark.parametrize("change", [{"hidden_size": 48}, {"num_hidden_layers": 2}, {"num_hidden_layers": 4}])
def test_an_adapter_of_another_base_is_refused_with_its_name(recipe, adapter, changed, change, model_folder):
    text = problems(recipe(changed(**change), adapter_name_or_path=str(adapter())))
    assert text.startswith("adapter_name_or_path") and "does not fit" in text and str(model_folder) in text


def test_a_broken_adapter_is_found_in_the_checks(recipe, adapter, tmp_path):
    folder = adapter()
    mine = recipe(adapter_name_or_path=str(folder))
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = config.read_text()
    weights.write_bytes(weights.read_bytes()[:-100])
    assert problems(mine).startswith(f"adapter_name_or_path: {folder}: ")
    weights.unlink()
    torch.save({}, folder / "adapter_model.bin")
    assert "never opened" in problems(mine)
    shutil.copy(tmp_path / "adapter" / "adapter_model.bin", weights)
    for text in ("{", "[]", "{}", '{"peft_type": "NONE_SUCH"}', whole.replace('"r": 3', '"r": "x"')):
        config.write_text(text)
        assert problems(mine).startswith("adapter_name_or_path")
    for absent in (str(tmp_path / "nowhere"), "~/nowhere", "./" + "x" * 300, "y" * 300, "some/adapter"):
        assert problems(recipe(adapter_name_or_path=absent)).startswith("adapter_name_or_path")


def test_a_dora_adapter_does_not_go_on_a_4_bit_base(recipe, adapter):
    folder = str(adapter(use_dora=True))
    assert "use_dora" in problems(recipe(method="qlora", adapter_name_or_path=folder))
    assert problems(recipe(method="lora", adapter_name_or_path=folder)) == ""


def test_an_adapter_that_is_no_lora_is_refused(recipe, adapter):
    folder = adapter()
    config = json.loads((folder / "adapter_config.json").read_text())
    ia3 = {"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []}
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": config["revision"], **ia3}))
    assert "IA3" in problems(recipe(adapter_name_or_path=str(folder)))


def test_a_target_that_takes_no_adapter_is_refused_by_name(recipe):
    text = problems(recipe(lora_target_modules="mlp,input_layernorm,embed_tokens,q_proj"))
    assert "'mlp' is a LlamaMLP" in text and "'input_layernorm' is a LlamaRMSNorm" in text
    assert "'embed_tokens'" not in text and "'q_proj'" not in text


def test_a_family_without_the_attention_asked_for_gets_the_one_it_has(recipe, changed):
    from transformers import Gemma2Config

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = changed(**Gemma2Config(**shape, head_dim=8, intermediate_size=64, vocab_size=320).to_dict())
    with pytest.raises(UserError, match="sdpa") as caught:
        problems(recipe(folder))
    assert str(caught.value).startswith("error: attn_implementation: Gemma2ForCausalLM has no sdpa attention")
    assert "--attn_implementation eager" in str(caught.value)
    assert problems(recipe(folder, attn_implementation="eager")) == ""


@pytest.mark.parametrize("family", ["bert", "bart", "xlm-roberta"])
def test_a_model_that_sees_the_next_token_is_refused_though_it_opens(recipe, changed, family):
    mine = recipe(changed(model_type=family))
    with pytest.raises(UserError, match="not a causal language model"):
        build_meta_model(mine, open_config(mine))


def test_a_home_folder_is_found_and_a_long_name_is_no_traceback(recipe, model_folder, adapter, monkeypatch):
    folder = adapter()
    monkeypatch.setenv("HOME", str(folder.parent))
    shutil.copytree(model_folder, folder.parent / "base")
    mine = recipe("~/base", adapter_name_or_path="~/adapter")
    assert problems(mine) == "" and open_tokenizer(mine)
    build(mine, FP32)
    for name in ("~/nowhere", "x" * 5000, "/" + "x" * 300, "a/" + "b" * 300):
        with pytest.raises(UserError, match="model_name_or_path"):
            open_config(recipe(name))


def test_a_folder_without_a_tokenizer_is_refused(recipe, changed):
    folder = changed()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match=r"no tokenizer in .*tokenizer\.json beside the weights"):
        open_tokenizer(recipe(folder))


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def with_template(recipe, adapter):
    """An adapter's folder, as a run leaves it."""
    folder = adapter()
    tokenizer = open_tokenizer(recipe())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_an_adapter_brings_its_tokenizer_or_takes_the_model_s(recipe, with_template, model_folder):
    mine = recipe(adapter_name_or_path=str(with_template))
    assert open_tokenizer(mine).chat_template == TEMPLATE
    (with_template / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"^error: adapter_name_or_path: no tokenizer in"):
        open_tokenizer(mine)
    (with_template / "tokenizer_config.json").unlink()
    assert open_tokenizer(mine).chat_template == (model_folder / "chat_template.jinja").read_text()


def test_an_adapter_from_the_hub_does_so_too(recipe, with_template, model_folder, tmp_path, monkeypatch):
    from huggingface_hub import constants, errors

    adapter, tokenizer = {}, {}
    for path in with_template.iterdir():
        (adapter if path.name.startswith("adapter") else tokenizer)[path.name] = path.read_bytes()
    snapshot = tmp_path / "hub"
    on_hub, asked = adapter | tokenizer, []

    def hf_hub_download(name, file):
        asked.append(file)
        if file not in on_hub:
            raise errors.EntryNotFoundError(file)
        snapshot.mkdir(exist_ok=True)
        (snapshot / file).write_bytes(on_hub[file])
        return str(snapshot / file)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("kit.model.locate.hf_hub_download", hf_hub_download)
    mine = recipe(adapter_name_or_path="some/adapter")
    assert open_tokenizer(mine).chat_template == TEMPLATE
    shutil.rmtree(snapshot)
    on_hub = adapter
    assert open_tokenizer(mine).chat_template == (model_folder / "chat_template.jinja").read_text()
    assert problems(mine) == ""
    assert "chat_template.jinja" in asked
    on_hub = tokenizer
    assert problems(mine).startswith("adapter_name_or_path: some/adapter: adapter_config.json")


def test_weights_of_another_shape_than_the_config_are_a_users_mistake(recipe, changed):
    with pytest.raises(UserError, match="model_name_or_path"):
        build(recipe(changed(intermediate_size=48)), FP32)


def test_cut_off_weights_are_a_users_mistake(recipe, changed):
    weights = changed() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="model_name_or_path"):
        build(recipe(weights.parent), FP32)


DAMAGED = ["", "{", "[]", "null", "{}", "[" * 200_000, '{"metadata": {}, "weight_map": null}']
DAMAGED += ['{"metadata": {}, "weight_map": {}}', '{"metadata": {}, "weight_map": ["model.safetensors"]}']
DAMAGED += ['{"metadata": {}, "weight_map": {"lm_head.weight": 3}}', '{"weight_map": {"lm_head.weight": "part"}}']


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_index_is_refused_by_name_before_anything_is_loaded(recipe, changed, text):
    folder = changed()
    index = folder / "model.safetensors.index.json"
    index.write_text(text)
    assert problems(recipe(folder)) == ""  # beside undivided weights nobody opens it
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    with pytest.raises(UserError, match=r"model_name_or_path: .*index\.json"):
        open_config(recipe(folder))


def test_weights_in_parts_are_opened(recipe, changed):
    folder = changed()
    weights = (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), weights.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert build(recipe(folder), FP32)


@pytest.mark.parametrize("text", ["[]", "null", '"x"', "{"])
@pytest.mark.parametrize("name", ["adapter_config.json", "generation_config.json"])
def test_other_files_that_are_read_with_the_weights_end_in_no_traceback(recipe, changed, name, text):
    folder = changed()
    (folder / name).write_text(text)
    if (name, text) == ("generation_config.json", "{"):
        assert build(recipe(folder), FP32)  # transformers goes on without
        return
    with pytest.raises(UserError, match=f"model_name_or_path: .*{name}"):
        build(recipe(folder), FP32)


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


def test_a_model_that_needs_its_own_code_is_refused(recipe, booby_trap):
    folder, _ = booby_trap("own_type")
    with pytest.raises(UserError, match=r"model_name_or_path: .*custom code"):
        open_config(recipe(folder))


def test_the_refusal_names_the_flag_that_allows_it(recipe, booby_trap):
    folder, _ = booby_trap("own_type")
    with pytest.raises(UserError, match="--trust_remote_code"):
        open_config(recipe(folder))


def test_it_is_executed_when_the_user_says_so(recipe, booby_trap):
    """The trap works: without this the test above proves nothing."""
    folder, canary = booby_trap("own_type")
    open_config(recipe(folder, trust_remote_code=True))
    assert canary.exists()


def test_the_shipped_default_keeps_code_out():
    assert Recipe(model_name_or_path="m", dataset="d").trust_remote_code is False
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert "trust_remote_code" not in path.read_text(), path
