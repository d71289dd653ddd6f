"""The model card shows how to open what lies beside it, so that it stops where its answers end, or how to merge it."""

from types import SimpleNamespace

import pytest
import torch

from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.export.final import describe_serving, model_card, write_model
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.strategy.strategies import SINGLE

STRATEGY = SimpleNamespace(type=SINGLE, num_processes=1, mixed_precision="no")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_snippet_loads_generation_settings_only_where_plain_loading_does_not(method):
    recipe = Recipe(model_name_or_path="some/base", dataset="d.jsonl", max_length=8, method=method)
    card = model_card(recipe, STRATEGY, {}, 1, {"<|im_end|>": 2})
    assert "answers end with `<|im_end|>`" in card
    assert ("GenerationConfig.from_pretrained" in card) == (method == "lora")
    bare = model_card(recipe, STRATEGY, {}, 1)
    assert "answers end" not in bare and "GenerationConfig" not in bare


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
