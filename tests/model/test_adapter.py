"""Adapters begin the same everywhere, go on with their own shape, are refused where they do not fit, and can be off."""

import shutil

import pytest
import torch
from model_helpers import BF16, FP32, build, problems
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import tiny_config
from kit.model.adapter import adapters_off, attach_adapter, check_adapter
from kit.model.load import build_meta_model, check_model, open_config


@pytest.mark.slow
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


def test_a_continued_adapter_keeps_its_own_shape(recipe, tmp_path):
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


def test_a_mistyped_target_module_gets_a_hint(recipe):
    text = problems(recipe(lora_target_modules="q_porj,v_proj,nothing_like_it"))
    assert "no module 'q_porj'" in text and "did you mean 'q_proj'?" in text
    assert "no module 'nothing_like_it'" in text and "down_proj" in text
    assert "'v_proj'" not in text
    assert problems(recipe(method="full", lora_target_modules="q_porj")) == ""  # not looked at


EXPRESSION = r"model\.layers\.[02]\.(self_attn\.[qk]|mlp\.up)_proj"


def test_an_expression_names_modules_as_peft_reads_it_and_the_saved_adapter_lists_them(recipe):
    mine = recipe(lora_target_modules=EXPRESSION)
    base = build_meta_model(mine, open_config(mine))
    peft_own = get_peft_model(build_meta_model(mine, open_config(mine)), LoraConfig(target_modules=EXPRESSION))
    adapted = attach_adapter(base, mine)
    names = {name for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
    assert names == {name for name, module in peft_own.named_modules() if hasattr(module, "lora_A")}
    assert len(names) == 2 * 3
    assert "model.layers.2.mlp.up_proj" in adapted.peft_config["default"].target_modules


@pytest.mark.slow
def test_checking_an_adapter_that_fits_changes_nothing(recipe, adapter):
    for settings in ({}, {"lora_target_modules": "embed_tokens,q_proj,lm_head"}):
        mine = recipe(adapter_name_or_path=str(adapter(**settings)))
        config = open_config(mine)
        meta_model = build_meta_model(mine, config)
        before = [name for name, _ in meta_model.named_parameters()]
        assert check_model(mine, config, meta_model) == []
        assert [name for name, _ in meta_model.named_parameters()] == before
        attach_adapter(meta_model, mine)


@pytest.mark.slow
def test_an_adapter_of_another_base_is_refused_with_its_name(recipe, adapter, changed, model_folder):
    text = problems(recipe(changed(num_hidden_layers=2), adapter_name_or_path=str(adapter())))
    assert text.startswith("adapter_name_or_path") and "does not fit" in text and str(model_folder) in text


@pytest.mark.slow
def test_a_broken_adapter_is_reported_by_the_checks(recipe, adapter, tmp_path):
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
    for text in ("{", "[]", '{"peft_type": "NONE_SUCH"}', whole.replace('"r": 3', '"r": "x"')):
        config.write_text(text)
        assert problems(mine).startswith("adapter_name_or_path")
    for absent in ("~/nowhere", "./" + "x" * 300, "some/adapter"):
        assert problems(recipe(adapter_name_or_path=absent)).startswith("adapter_name_or_path")


@pytest.mark.slow
def test_a_dora_adapter_on_a_4_bit_base_is_refused(recipe, adapter):
    folder = str(adapter(use_dora=True))
    assert "use_dora" in problems(recipe(method="qlora", adapter_name_or_path=folder))
    assert problems(recipe(method="lora", adapter_name_or_path=folder)) == ""


def test_other_kinds_train_every_layer_and_open_again_with_the_same_logits(recipe, tmp_path):
    """A float32 state of what trains is all that ``final/`` holds."""
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    for kind, options in {"oft": {"oft_block_size": 16}, "vera": {"r": 8}}.items():
        mine = recipe(adapter_type=kind, adapter_options=options)
        assert problems(mine) == "", kind
        model = build(mine, FP32)
        model(input_ids=ids, labels=ids).loss.backward()
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        assert len(layers) == 3 * 7
        for layer in layers:
            owned = [p for name in layer.adapter_layer_names for p in getattr(layer, name).parameters()]
            assert any(p.grad is not None and p.grad.any() for p in owned), kind
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert {p.dtype for p in trained.values()} == {torch.float32}
        with torch.no_grad():
            for parameter in trained.values():
                parameter.add_(0.01)
        model.save_pretrained(tmp_path / kind, state_dict={name: p.detach() for name, p in trained.items()})
        base = AutoModelForCausalLM.from_pretrained(mine.model_name_or_path)
        opened = PeftModel.from_pretrained(base, tmp_path / kind)
        again = recipe(adapter_name_or_path=str(tmp_path / kind), adapter_type=kind)
        assert problems(again) == "", kind
        with torch.no_grad():
            expected = model.eval()(input_ids=ids).logits
            assert torch.equal(opened.eval()(input_ids=ids).logits, expected), kind
            assert torch.equal(build(again, FP32).eval()(input_ids=ids).logits, expected), kind


def test_kinds_and_options_that_do_not_fit_are_named(recipe, adapter):
    cases = [
        ({"adapter_type": "offt"}, ("adapter_type: 'offt'", "did you mean 'oft'?")),
        ({"adapter_type": "adalora"}, ("adapter_type: 'adalora'",)),  # its ranks follow a schedule
        ({"adapter_options": "rank_patern=1"}, ("adapter_options: 'rank_patern'", "did you mean 'rank_pattern'?")),
        ({"adapter_options": "lora_alpha=1"}, ("adapter_options: 'lora_alpha'",)),  # a flag
        ({"adapter_options": "alpha_pattern=x"}, ("adapter_options: peft's lora does not take LlamaForCausalLM",)),
        # peft would take another size
        ({"adapter_type": "oft", "adapter_options": "oft_block_size=24"}, ("Invalid `oft_block_size` (24)",)),
        ({"adapter_type": "loha", "method": "qlora"}, ("does not go with a base of 4 bits",)),
        ({"adapter_name_or_path": str(adapter()), "adapter_type": "oft"}, ("adapter of LORA", "--adapter_type lora")),
    ]
    for settings, words in cases:
        found = problems(recipe(**settings))
        assert all(word in found for word in words), (settings, found)
    assert problems(recipe(adapter_type="oft", method="qlora", adapter_options="oft_block_size=16")) == ""


def test_options_of_a_lora_are_those_of_peft(recipe):
    model = build(recipe(adapter_options='{"rank_pattern": {"q_proj": 3}, "layers_to_transform": [1]}'), FP32)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert len(layers) == 7 and all(".layers.1." in name for name in layers)
    assert {layer.r["default"] for name, layer in layers.items() if name.endswith("q_proj")} == {3}


def test_fused_experts_are_refused_with_other_kinds_than_lora(recipe):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    mine = recipe(adapter_type="oft", lora_target_modules=["q_proj", "experts.gate_up_proj"])
    (problem,) = check_adapter(mine, model)
    assert "experts.gate_up_proj: only LoRA adapts fused experts" in problem.found


def losses_of(model):
    """The losses of some targets, float32 [5]; the last token is a special one, whose row may train."""
    ids = torch.tensor([[1, 40, 2, 50, 60, 2]])
    wanted = {"target_positions": torch.arange(5), "targets": ids[0, 1:]}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **wanted)


OFF_CASES = [
    {"use_dora": True},
    {"lora_target_modules": "embed_tokens,q_proj,lm_head"},
    {"lora_modules_to_save": "embed_tokens,lm_head"},
    {"trainable_tokens": ["<|im_end|>", "<|im_start|>"]},
    {"new_tokens": ["<|new|>"]},
    {"method": "qlora"},
]


def test_a_model_with_its_adapters_off_answers_as_its_base_does(recipe, model_folder, tied):
    """Exactly, whatever trains beside the adapters; and afterwards everything is as it was."""
    for is_tied in [False, True]:
        for case in OFF_CASES:
            if is_tied and "lm_head" in str(case):
                case = {name: value.replace(",lm_head", "") for name, value in case.items()}
            folder = tied if is_tied else model_folder
            mine = recipe(folder, **case)
            if mine.method == "qlora":  # nobody else has these 4-bit weights; new adapters add nothing
                base = build(mine, FP32)
            else:
                base = build(recipe(folder, method="full", new_tokens=mine.new_tokens), FP32)
            expected = losses_of(base)
            model = build(mine, FP32)
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            moved, trained = losses_of(model), {name: p.requires_grad for name, p in model.named_parameters()}
            assert (moved - expected).abs().max() > 1e-3, (is_tied, case)
            with adapters_off(model):
                assert torch.equal(losses_of(model), expected), (is_tied, case)
                assert {name: p.requires_grad for name, p in model.named_parameters()} == trained, (is_tied, case)
            assert torch.equal(losses_of(model), moved), (is_tied, case)
            assert {name: p.requires_grad for name, p in model.named_parameters()} == trained, (is_tied, case)
