"""Adapters start the same on all ranks, continue with their own shape, are refused if they do not fit, can be off."""

import re

import pytest
import torch
from helpers import ROOT
from model_helpers import BF16, FP32, build, on_meta, problems
from peft import LoraConfig, get_peft_model

from kit.model.adapters.adapter import adapters_off, attach_adapter, check_adapter
from kit.model.build import build_meta_model, check_model, open_config

IDS = torch.tensor([[1, 40, 2, 50, 60, 2]])  # the last token is a special one, whose row may train


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def moved(model):
    """``model`` with other values of what trains."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_the_seed_alone_decides_the_first_adapters(recipe):
    """Not what ran before: sharding takes each rank's part of what must be one matrix."""

    def adapters(seed):
        torch.rand(7)
        return trained(build(recipe(method="lora", seed=seed), FP32))

    first, second, other = adapters(1), adapters(1), adapters(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    assert not any(p.any() for name, p in first.items() if "lora_B" in name)  # starts as the base model


def test_a_continued_adapter_keeps_its_own_shape(recipe, tmp_path):
    first = moved(build(recipe(lora_r=3, lora_target_modules="q_proj"), FP32))
    first.save_pretrained(tmp_path / "adapter")
    again, expected = trained(build(recipe(adapter_name_or_path=str(tmp_path / "adapter")), BF16)), trained(first)
    assert set(again) == set(expected)
    assert all(p.dtype == torch.float32 and torch.equal(p, expected[name]) for name, p in again.items())


def test_a_dropout_that_a_continued_adapter_would_not_have_is_refused(recipe, adapter):
    mine = {"adapter_name_or_path": str(folder := adapter(lora_dropout=0.25))}
    assert problems(recipe(**mine)) == problems(recipe(**mine, lora_dropout=0.25)) == ""
    assert problems(recipe(**mine, lora_dropout=0.5)) == (
        f"lora_dropout: 0.5, and {folder} keeps its 0.25\n    -> leave it out"
    )


def test_a_mistyped_target_module_gets_a_hint(recipe):
    text = problems(recipe(lora_target_modules="q_porj,v_proj,nothing_like_it"))
    assert "no module 'q_porj'" in text and "did you mean 'q_proj'?" in text
    assert "no module 'nothing_like_it'" in text and "down_proj" in text and "'v_proj'" not in text


def test_an_expression_names_modules_as_peft_reads_it_and_the_saved_adapter_lists_them(recipe):
    expression = r"model\.layers\.[02]\.(self_attn\.[qk]|mlp\.up)_proj"
    mine = recipe(lora_target_modules=expression)
    base, other = (build_meta_model(mine, open_config(mine)) for _ in range(2))
    adapted, theirs = attach_adapter(base, mine), get_peft_model(other, LoraConfig(target_modules=expression))
    ours, of_peft = ({n for n, m in each.named_modules() if hasattr(m, "lora_A")} for each in (adapted, theirs))
    assert ours == of_peft and len(ours) == 2 * 3
    assert "model.layers.2.mlp.up_proj" in adapted.peft_config["default"].target_modules


def test_an_adapter_is_checked_from_shapes_alone_and_one_of_another_base_is_refused(
    recipe, adapter, changed, model_folder
):
    for settings in ({}, {"lora_target_modules": "embed_tokens,q_proj,lm_head"}):
        mine = recipe(adapter_name_or_path=str(adapter(**settings)))
        config = open_config(mine)
        meta_model = build_meta_model(mine, config)
        before = [name for name, _ in meta_model.named_parameters()]
        assert not list(check_model(mine, config, meta_model))
        assert [name for name, _ in meta_model.named_parameters()] == before
    text = problems(recipe(changed(num_hidden_layers=2), adapter_name_or_path=str(adapter())))
    assert text.startswith("adapter_name_or_path") and "does not fit" in text and str(model_folder) in text


def test_a_broken_adapter_is_reported_by_the_checks(recipe, adapter):
    folder = adapter()
    mine = recipe(adapter_name_or_path=str(folder))
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = config.read_text()
    weights.write_bytes(weights.read_bytes()[:-100])
    assert problems(mine).startswith(f"adapter_name_or_path: {folder}: ")
    weights.rename(folder / "adapter_model.bin")
    assert "never opened" in problems(mine)
    (folder / "adapter_model.bin").rename(weights)
    for text in ("{", "[]", '{"peft_type": "NONE_SUCH"}', whole.replace('"r": 3', '"r": "x"')):
        config.write_text(text)
        assert problems(mine).startswith("adapter_name_or_path")
    for absent in ("~/nowhere", "./" + "x" * 300, "some/adapter"):
        assert problems(recipe(adapter_name_or_path=absent)).startswith("adapter_name_or_path")


def test_kinds_and_options_that_do_not_fit_are_named(recipe, adapter):
    cases = [
        ({"adapter_type": "adalora"}, ("adapter_type: 'adalora'",)),  # its ranks follow a schedule
        ({"adapter_options": "rank_patern=1"}, ("adapter_options: 'rank_patern'", "did you mean 'rank_pattern'?")),
        ({"adapter_options": "lora_alpha=1"}, ("adapter_options: 'lora_alpha'",)),  # a flag
        ({"adapter_options": "alpha_pattern=x"}, ("adapter_options: peft's lora cannot adapt LlamaForCausalLM",)),
        # peft would take another size
        ({"adapter_type": "oft", "adapter_options": "oft_block_size=24"}, ("Invalid `oft_block_size` (24)",)),
        ({"adapter_type": "loha", "method": "qlora"}, ("does not work on a 4-bit base",)),
        ({"adapter_name_or_path": str(adapter()), "adapter_type": "oft"}, ("LORA adapter", "--adapter_type lora")),
        ({"adapter_name_or_path": str(adapter(use_dora=True)), "method": "qlora"}, ("use_dora", "--method lora")),
    ]
    for settings, words in cases:
        found = problems(recipe(**settings))
        assert all(word in found for word in words), (settings, found)
    mine = recipe(adapter_type="oft", lora_target_modules=["experts.gate_up_proj"])
    (problem,) = check_adapter(mine, on_meta("mixtral"))
    assert "experts.gate_up_proj: only LoRA adapts fused experts" in problem.found


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_with_its_adapters_off_computes_as_its_base_does(recipe, model_folder, tied, is_tied):
    """Exactly, whatever trains beside the adapters; and afterwards everything is as it was."""
    folder = tied if is_tied else model_folder
    head = "" if is_tied else ",lm_head"

    def losses_of(model):
        wanted = {"target_positions": torch.arange(5), "targets": IDS[0, 1:]}
        with torch.no_grad():
            return model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **wanted)

    for case in (
        {"use_dora": True},
        {"lora_target_modules": "q_proj" if is_tied else "embed_tokens,q_proj,lm_head"},
        {"lora_modules_to_save": f"embed_tokens{head}"},
        {"trainable_tokens": ["<|im_end|>", "<|im_start|>"]},
        {"new_tokens": ["<|new|>"]},
        {"method": "qlora"},
    ):
        mine = recipe(folder, **case)
        if mine.method == "qlora":  # nobody else has these 4-bit weights; new adapters add nothing
            base = build(mine, FP32)
        else:
            base = build(recipe(folder, method="full", new_tokens=mine.new_tokens), FP32)
        expected, model = losses_of(base), moved(build(mine, FP32))
        adapted, names = losses_of(model), set(trained(model))
        assert (adapted - expected).abs().max() > 1e-3, case
        with adapters_off(model):
            assert torch.equal(losses_of(model), expected) and set(trained(model)) == names, case
        assert torch.equal(losses_of(model), adapted) and set(trained(model)) == names, case


def test_the_example_of_pissa_in_the_documentation_gives_an_ordinary_adapter(
    tmp_path, monkeypatch, recipe, model_folder
):
    page = (ROOT / "docs/models.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].replace('"BASE"', repr(str(model_folder)))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert problems(recipe("rest", adapter_name_or_path="begun")) == ""
