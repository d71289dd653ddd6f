"""A path in the folder of a run opens with the settings of that run."""

import json

import pytest
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.run.model_source import precision_of, reference_of, to_open
from kit.system.errors import UserError


@pytest.fixture
def run(tmp_path, model_folder):
    """Writes the record of a run; returns its ``final/``."""

    def run(precision="bf16", **values):
        recipe = Recipe(model_name_or_path=str(model_folder), dataset="d", **values)
        record = {"recipe": recipe.model_dump(), "strategy": actual_strategy(mixed_precision=precision).record()}
        (tmp_path / "run.json").write_text(json.dumps(record))
        (tmp_path / "final").mkdir(exist_ok=True)
        return str(tmp_path / "final")

    return run


def opened(final, **flags):
    return to_open(Recipe(**{"model_name_or_path": "base", "adapter_name_or_path": final, "dataset": "d"} | flags))[0]


def test_settings_come_from_the_run_except_explicit_ones(run):
    trained = {"objective": "kto", "beta": 0.3, "max_length": 77, "method": "qlora", "train_on": "last"}
    trained |= {"qat": "int4_weight_only", "qat_group_size": 8, "method": "qlora", "min_pixels": 50, "max_pixels": 99}
    final = run(**trained)
    assert {name: getattr(opened(final), name) for name in trained} == trained
    given = {"objective": "simpo", "max_length": 50, "method": "lora", "qat": "int8_weight_only"}
    recipe = opened(final, **given)
    assert {name: getattr(recipe, name) for name in given} == given and recipe.train_on == "last"
    assert recipe.beta is None and recipe.qat_group_size is None, "they belong to what was replaced"
    rounded = run(fp8=True, method="lora")
    assert opened(rounded).fp8 and not opened(rounded, fp8=False).fp8 and not opened(rounded, method="qlora").fp8
    final = run(**trained)
    whole = {"model_name_or_path": final, "adapter_name_or_path": None}
    assert opened(final, **whole).method == "full" and opened(final, **whole).beta == 0.3
    final = run(dataset_columns="question=prompt,solution=completion")
    assert opened(final).dataset_columns == {"question": "prompt", "solution": "completion"}
    assert opened(final, dataset_columns="a=prompt").dataset_columns == {"a": "prompt"}
    assert [precision_of(path, "no") for path in (final, "base")] == ["bf16", "no"]


def test_code_is_not_taken_from_the_file_of_a_run(run, capsys):
    trained = {"objective": "grpo", "rewards": "exact_match,own.py:good", "reward_weights": "1,2", "max_turns": 3}
    trained |= {"tools": "own.py:add", "environment": "own.py:Game", "max_new_tokens": 9}
    final = run(**trained)
    recipe = opened(final)
    assert recipe.objective == "grpo" and not any(recipe.code.values()) and recipe.rewards == []
    assert recipe.reward_weights is None and "note: the run had tools" in capsys.readouterr().err
    recipe = opened(final, objective="grpo", tools="mine.py:add")
    assert (recipe.tools, recipe.environment, recipe.rewards) == (["mine.py:add"], None, [])
    assert (recipe.max_turns, recipe.max_new_tokens) == (3, 9) and not capsys.readouterr().err
    final = run(**trained | {"rewards": "environment", "reward_weights": "2"})
    assert opened(final, tools="mine.py:add").rewards == []  # there is none to ask
    recipe = opened(final, environment="mine.py:Game")
    assert (recipe.rewards, recipe.reward_weights) == (["environment"], [2.0])
    assert opened(final, environment="mine.py:Game", rewards="number").reward_weights is None


def test_the_reference_model_is_the_initial_model_of_the_run(run):
    final = run(objective="kto", method="lora", beta=0.3)
    assert reference_of(final, opened(final), "lora") is None  # the base without the adapter
    final = run(objective="dpo", method="lora", adapter_name_or_path="first")
    assert reference_of(final, opened(final), "lora").adapter_name_or_path == "first"
    final = run(objective="kto", method="full")
    assert (
        reference_of(final, opened(final, model_name_or_path=final, adapter_name_or_path=None), "full").method == "full"
    )
    elsewhere = Recipe(model_name_or_path="other", dataset="d", method="full", objective="dpo")
    with pytest.raises(
        UserError, match="objective: dpo needs the reference model, which is not known for other, a full"
    ):
        reference_of("other", elsewhere, "full")
