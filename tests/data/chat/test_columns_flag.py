"""A flag that a message names arrives as it is meant, if it is pasted into a shell."""

import shlex

import pytest

from kit.config.dataset_entry import DatasetEntry
from kit.config.recipe import Recipe
from kit.data.chat.columns_flag import Listed, columns_flag, list_flag

NAMES = ["question", "my question, long", "it's=the answer", 'so "called"', "a: b", "ä$(x)`y`"]


@pytest.mark.parametrize("name", NAMES)
def test_a_mapping_of_columns_with_any_names_arrives(name):
    columns = {name: "prompt", "answer": "completion"}
    flag, value = shlex.split(columns_flag(columns))
    assert flag == "--dataset_columns"
    assert Recipe(model_name_or_path="m", dataset="d", dataset_columns=value).dataset_columns == columns


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", ["a.jsonl", "my data, v1/it's: q&a #1.jsonl", "~/x*.csv", "true", "[a]", "- b"])
def test_a_list_of_data_sets_with_any_paths_arrives(path, name):
    given = [
        DatasetEntry(path=path, columns={name: "text"}, weight=0.5),
        DatasetEntry(path="org/data", name="x", config="main", split="train[:10%]", revision="v1", weight=2),
    ]
    filled = [entry.filled(None, "train", {}) for entry in given]
    flag, value = shlex.split(list_flag("dataset", filled))
    assert flag == "--dataset" and Recipe(model_name_or_path="m", dataset=value).dataset_entries == filled


def test_a_mapping_for_one_of_several_goes_into_the_list_and_one_that_ignores_is_for_all():
    entries = tuple(DatasetEntry(path=f"{name}.jsonl") for name in "ab")
    columns = {"x": "ignore"}
    assert Listed("dataset", entries[:1], 0, True).with_columns(columns) == "--dataset_columns x=ignore"
    alone = Listed("eval_dataset", entries[:1], 0, is_alone=False)
    assert alone.with_columns(columns) == "--eval_dataset '[{path: a.jsonl, columns: {x: ignore}}]'"
    assert alone.ignoring(columns) == "--dataset_columns x=ignore"
    expected = "--dataset '[{path: a.jsonl}, {path: b.jsonl, columns: {x: ignore}}]'"
    assert Listed("dataset", entries, 1, False).ignoring(columns) == expected


def test_a_data_set_is_left_out_of_the_list_that_a_flag_names():
    entries = tuple(DatasetEntry(path=path, weight=weight) for path, weight in (("a.jsonl", 1), ("b c.jsonl", 2)))
    flag, value = shlex.split(Listed("dataset", entries, 0, is_alone=False).left_out())
    (left,) = Recipe(model_name_or_path="m", **{flag.removeprefix("--"): value}).dataset
    assert (left.path, left.weight) == ("b c.jsonl", 2)
    assert Listed("dataset", entries[:1], 0, is_alone=True).left_out() == ""
