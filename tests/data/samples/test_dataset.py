"""A data set of the recipe: what of it decides what is learned."""

from data_helpers import open_recipe_datasets, recipe, write


def opened(**changes):
    return open_recipe_datasets(recipe(**changes))[0]


def test_the_wording_of_rows_decides_what_is_learned(tmp_path):
    write(tmp_path / "train.jsonl", {"instruction": "a", "input": "b", "output": "c"})
    entry = {"path": str(tmp_path / "train.jsonl")}
    keys = [opened(dataset=[entry | more]).key for more in ({}, {"prompt_format": "{instruction}"})]
    assert keys[0] == opened(dataset=entry["path"]).key != keys[1]
