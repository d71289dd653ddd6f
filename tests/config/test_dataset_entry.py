"""An entry of a list of data sets has a name for tables."""

import pytest

from kit.config.dataset_entry import DatasetEntry


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("d/sums.jsonl.gz", "sums"),
        ("d/sums.TXZ", "sums"),
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
    ],
)
def test_a_data_set_is_named_by_a_word_for_tables(path, name, tmp_path, monkeypatch):
    (tmp_path / "here" / "d" / "folder").mkdir(parents=True)
    (tmp_path / "here" / "d" / "v1.5").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert DatasetEntry(path=path).filled(None, "train", {}).name == name
    assert DatasetEntry(path=path, name="mine").filled(None, "train", {}).name == "mine"
