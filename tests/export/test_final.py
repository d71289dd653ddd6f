"""The model card shows how to open what lies beside it, so that it stops where its answers end, or how to merge it."""

import re
from types import SimpleNamespace

import pytest
import torch
import yaml

from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.export.final import describe_serving, model_card, write_model
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.strategy.strategies import SINGLE
from kit.visible import one_line

STRATEGY = SimpleNamespace(type=SINGLE, num_processes=1, mixed_precision="no")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_snippet_loads_generation_settings_only_where_plain_loading_does_not(method):
    recipe = Recipe(model_name_or_path="some/base", dataset="d.jsonl", max_length=8, method=method)
    card = model_card(recipe, STRATEGY, {}, 1, {"<|im_end|>": 2})
    assert "answers end with `<|im_end|>`" in card
    assert ("GenerationConfig.from_pretrained" in card) == (method == "lora")
    bare = model_card(recipe, STRATEGY, {}, 1)
    assert "answers end" not in bare and "GenerationConfig" not in bare


def test_a_card_of_usual_names_has_no_marks_around_them():
    recipe = Recipe(model_name_or_path="some/base-1.5B_v2", dataset="d.jsonl", max_length=8)
    card = model_card(recipe, STRATEGY, {"eval_loss/d": 1.0}, 1)
    assert card.startswith(
        "---\nlibrary_name: peft\nbase_model: some/base-1.5B_v2\n---\n\n# base-1.5B_v2, fine-tuned (lora)\n"
    )
    assert "\n- data: `d`, 1 steps of" in card and "\n- eval_loss/d: 1\n" in card


HOSTILE = [
    "a\nlicense: mit\n---\n# b",
    "---",
    "a: b # c",
    "`a` <script>b</script> ``",
    "[a](https://b.c)\x1b[2J\u202e",
    "{a: !!python/object b}",
    "123",
    "null",
]


def card_of(name):
    entry = {"path": "d.jsonl", "name": name}
    recipe = Recipe(model_name_or_path=name, dataset=[entry], max_length=8, new_tokens=[name])
    return model_card(recipe, STRATEGY, {f"eval_loss/{name}": 1.0}, 1, {name: 2})


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_strangers_are_only_names_in_a_card(name):
    card, usual = card_of(name), card_of("a")
    assert len(card.splitlines()) == len(usual.splitlines()) and "\x1b" not in card and "\u202e" not in card
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front) == {"library_name": "peft", "base_model": one_line(name)}
    outside = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", body.split("```python")[0])  # of code spans
    assert not re.search(r"[<>\[\]{!`\\]", outside)


@pytest.mark.parametrize("changes", [{}, {"trainable_tokens": ["<|im_end|>"]}, {"use_dora": True}])
def test_an_adapter_that_servers_take_only_merged_says_so_with_the_command(model_folder, tmp_path, changes):
    settings = MethodSettings(model_name_or_path=str(model_folder), **changes)
    model = build_model(settings, open_config(settings), LoadPlan(compute_dtype="float32", device="cpu"))
    state = {name: torch.ones_like(p) for name, p in model.named_parameters() if p.requires_grad}
    write_model(tmp_path, model, state, open_tokenizer(settings), "the card\n", None)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("the card\n") and bool(changes) == ("recipes/export.py path/to/this/folder" in card)
    lines = describe_serving(model, tmp_path / "final")
    assert bool(lines) == bool(changes)
    for line in lines:
        assert line.endswith(f"python recipes/export.py {tmp_path}/final --output_dir merged")
