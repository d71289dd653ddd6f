"""A data set of the recipe: which of its columns are read, and which decide what is learned."""

from data_helpers import chat, open_recipe_datasets, recipe, write


def opened(**changes):
    return open_recipe_datasets(recipe(**changes))[0]


def test_columns_that_must_not_be_ignored_unseen_are_read_too(tmp_path):
    write(tmp_path / "train.jsonl", {**chat("a", "b"), "images": [], "id": 7})
    dataset = opened()
    assert dataset.columns == [*dataset.fields.values(), "images"] and "id" not in dataset.columns
    assert dataset.ignored == frozenset() and dataset.key == sorted(dataset.fields.items())


def test_the_wording_of_rows_decides_what_is_learned(tmp_path):
    write(tmp_path / "train.jsonl", {"instruction": "a", "input": "b", "output": "c"})
    entry = {"path": str(tmp_path / "train.jsonl")}
    keys = [opened(dataset=[entry | more]).key for more in ({}, {"prompt_format": "{instruction}"})]
    assert keys[0] == opened(dataset=entry["path"]).key != keys[1]
