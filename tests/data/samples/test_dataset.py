"""A dataset of the recipe: the settings of its entry that change the training."""

from data_helpers import open_recipe_datasets, recipe, write


def opened(**changes):
    return open_recipe_datasets(recipe(**changes))[0]


def test_the_prompt_format_changes_the_training(tmp_path):
    write(tmp_path / "train.jsonl", {"instruction": "a", "input": "b", "output": "c"})
    entry = {"path": str(tmp_path / "train.jsonl")}
    keys = [opened(dataset=[entry | more]).key for more in ({}, {"prompt_format": "{instruction}"})]
    assert keys[0] == opened(dataset=entry["path"]).key != keys[1]
