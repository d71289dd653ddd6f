"""An entry of a list of datasets has a name for tables, and a list is written so that a shell and YAML read it."""

from kit.config.dataset_entry import DatasetEntry, in_one_line, with_own_names
from kit.schema.fields import dataset_entries


def test_a_data_set_is_named_by_a_word_for_tables(tmp_path, monkeypatch):
    (tmp_path / "here" / "d" / "folder").mkdir(parents=True)
    (tmp_path / "here" / "d" / "v1.5").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    cases = [
        ("d/sums.jsonl.gz", "sums"),
        ("d/folder/*.jsonl", "folder"),
        ("d/folder/part-*.jsonl", "part"),
        ("d/*/sums.jsonl", "sums"),
        ("*.jsonl", "here"),
        ("d/folder", "folder"),
        ("d/" + "x" * 300, "d/" + "x" * 300),
        ("openai/gsm8k", "openai/gsm8k"),
    ]
    for path, name in cases:
        assert DatasetEntry(path=path).filled(None, "train", {}).name == name, path
        assert DatasetEntry(path=path, name="mine").filled(None, "train", {}).name == "mine", path


def test_an_entry_is_written_in_one_line_as_it_was_read():
    for entry in (
        {"path": "it's: #1 [x] {y}, b.jsonl", "weight": 2.5},
        {"path": "null", "name": "yes", "max_samples": 200},
        {"path": "a.jsonl", "columns": {"my: question, or so": "prompt", "'a'": "completion"}},
        {"path": "a.jsonl", "prompt_format": "\n Task:\n{instruction}[\n\n'{input}' \"x\"] \n"},
    ):
        line = in_one_line([DatasetEntry.model_validate(entry).as_written()])
        assert "\n" not in line and dataset_entries(line) == [{key: value if isinstance(value, dict) else str(value)
                                                              for key, value in entry.items()}]  # fmt: skip


def test_data_sets_that_share_a_name_get_names_of_their_own():
    paths = ["a.jsonl", "b.jsonl", "x/a.jsonl", "x/a.jsonl", "y/a.jsonl"]
    names = [entry.filled(None, "", {}).name for entry in with_own_names([DatasetEntry(path=path) for path in paths])]
    assert len(set(names)) == 5 and names[1] == "b" and names[4] == "a-5"
