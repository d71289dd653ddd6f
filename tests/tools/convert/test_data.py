"""Data sets become the settings that a person would write."""

from kit.tools.convert.data import Data, columns_as_typed, first_rows, put_data
from kit.tools.convert.draft import Draft


def values_of(name, *data):
    draft = Draft({})
    put_data(draft, name, list(data))
    return draft.values


def test_one_data_set_is_written_by_single_settings():
    data = Data("a/b", "main", "train[:5]", "v1", {"q": "instruction", "output": "output"})
    assert values_of("dataset", data) == {
        "dataset": "a/b",
        "dataset_config": "main",
        "dataset_split": "train[:5]",
        "dataset_revision": "v1",
        "dataset_columns": "q=instruction",
    }


def test_the_split_of_an_evaluation_is_written_since_its_default_is_another():
    assert values_of("eval_dataset", Data("a/b")) == {"eval_dataset": "a/b", "eval_dataset_split": "train"}


def test_several_are_a_list_in_which_each_has_its_columns():
    (entries,) = values_of("dataset", Data("a.jsonl"), Data("b.jsonl", columns={"x,y": "text"})).values()
    assert [entry["path"] for entry in entries] == ["a.jsonl", "b.jsonl"]
    assert entries[1]["columns"] == '{"x,y": "text"}' and "columns" not in entries[0]


def test_a_limit_is_a_slice_and_a_slice_stays():
    assert (first_rows(None, 5), first_rows("test", 5), first_rows("train[:9]", 5)) == (
        "train[:5]",
        "test[:5]",
        "train[:9]",
    )
    assert columns_as_typed({"a": "text"}) == "a=text"
