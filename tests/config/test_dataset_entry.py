"""An entry of a list of data sets has a name for tables, and a list is written so that a shell and YAML read it."""

import shlex

from kit.config.dataset_entry import DatasetEntry, flag_of_list, list_as_typed, with_own_names
from kit.config.recipe import Recipe


def test_a_data_set_is_named_by_a_word_for_tables(tmp_path, monkeypatch):
    (tmp_path / "here" / "d" / "folder").mkdir(parents=True)
    (tmp_path / "here" / "d" / "v1.5").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    cases = [
        ("d/sums.jsonl.gz", "sums"),
        ("d/sums.CSV.xz", "sums"),
        ("d/.jsonl", "jsonl"),
        ("d/folder/*.jsonl", "folder"),
        ("d/folder/**/*.jsonl", "folder"),
        ("d/folder/**", "folder"),
        ("d/folder/part-*.jsonl", "part"),
        ("d/*/sums.jsonl", "sums"),
        ("*.jsonl", "here"),
        ("../here/*", "here"),
        ("d/folder", "folder"),
        ("d/folder/", "folder"),
        ("d/v1.5", "v1.5"),
        (".", "here"),
        ("d/..", "here"),
        ("/", "/"),
        ("d/" + "x" * 300, "d/" + "x" * 300),
        ("openai/gsm8k", "openai/gsm8k"),
        ("gsm8k", "gsm8k"),
    ]
    for path, name in cases:
        assert DatasetEntry(path=path).filled(None, "train", {}).name == name, path
        assert DatasetEntry(path=path, name="mine").filled(None, "train", {}).name == "mine", path


def test_a_list_of_data_sets_arrives_as_it_is_when_its_flag_is_typed():
    cases = [
        [{"path": "a.jsonl"}, {"path": "b.jsonl"}],
        [{"path": "a, b.jsonl"}, {"path": "it's: #1 [x] {y}.jsonl"}, {"path": '"q" $(x) `y` \\ é.jsonl'}],
        [{"path": "[a].jsonl"}],
        [{"path": "null", "weight": 2.5}, {"path": "1e5", "name": "yes"}],
        [{"path": "a.jsonl", "columns": {"my: question, or so": "prompt", "'a'": "completion"}}],
        [{"path": "a.jsonl", "prompt_format": "\n Task:\n{instruction}[\n\n'{input}' \"x\"] \n"}],
    ]
    for entries in cases:
        entries = [DatasetEntry.model_validate(entry) for entry in entries]
        flag, value = shlex.split(flag_of_list("dataset", entries))
        recipe = Recipe(model_name_or_path="m", **{flag[2:]: value})
        given = recipe.dataset if isinstance(recipe.dataset, list) else [DatasetEntry(path=recipe.dataset)]
        assert given == entries, entries


def test_a_number_of_rows_is_shown_as_it_was_typed():
    entries = [DatasetEntry(path="a", max_samples=200), DatasetEntry(path="b", max_samples=0.5, weight=2)]
    assert list_as_typed(entries) == "[{path: a, max_samples: 200}, {path: b, max_samples: 0.5, weight: 2}]"


def test_data_sets_that_share_a_name_get_names_of_their_own():
    paths = ["a.jsonl", "b.jsonl", "x/a.jsonl", "x/a.jsonl", "y/a.jsonl"]
    names = [entry.filled(None, "", {}).name for entry in with_own_names([DatasetEntry(path=path) for path in paths])]
    assert len(set(names)) == 5 and names[1] == "b" and names[4] == "y-a"
