"""The model card shows how to open what lies beside it, so that it stops where its answers end."""

from types import SimpleNamespace

import pytest

from kit.config.recipe import Recipe
from kit.export.final import model_card
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
