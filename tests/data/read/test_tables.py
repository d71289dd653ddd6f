"""Parquet and Arrow: the rows as they were written, and a damaged table is reported."""

import pytest
from data_helpers import contents, problems, refused, source_of, text_rows, write_any

from kit.system.errors import UserError


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_of_tables_only_the_needed_columns_are_read(name):
    write_any(name, text_rows(3))
    assert contents(source_of(name), ["text", "else"]) == [{"text": f"ü {i}"} for i in range(3)]
    assert contents(source_of(name), []) == [{}] * 3


def test_what_save_to_disk_has_written_comes_as_it_was(folder):
    """Also objects of different keys; what `datasets` keeps of a function that it has mapped is no data."""
    import datasets

    rows = [{"m": [{"role": "user"}, {"role": "tool", "c": [{"a": i}, {"b": "x"}]}]} for i in range(30)]
    table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    table.save_to_disk("one", num_shards=2)
    datasets.DatasetDict({"train_sft": table, "train_gen": table.select([7])}).save_to_disk("several")
    datasets.load_from_disk("several")["train_gen"].map(lambda row: {"more": 1})
    assert contents(source_of("one")) == contents(source_of("several", "train_sft")) == rows
    assert contents(source_of("several", "train_gen")) == rows[7:8]
    assert source_of("several", "train_gen").notes[0].endswith(".arrow (1)")
    assert "no split 'train'; expected train_gen, train_sft" in refused("several")
    assert "'train[:5]', but 'one' is not a hub id" in refused("one", "train[:5]")
    (folder / "one/data-00001-of-00002.arrow").rename("lost.arrow")
    assert "one has 1 files data-*.arrow, of a save of 2; expected all files of one save" in refused("one")
    table.save_to_disk("one", num_shards=1)  # which leaves the files of the save before
    assert "one has 2 files data-*.arrow, of a save of 1 and a save of 2" in refused("one")


def test_classes_are_read_by_their_names():
    import datasets

    kind = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"label": kind, "several": datasets.Sequence(kind), "text": datasets.Value("string")})
    rows = {"label": [1, 0, -1], "several": [[0, 1], [], [1]], "text": ["a", "b", "c"]}
    table = datasets.Dataset.from_dict(rows, features)
    table.to_parquet("a.parquet")
    table.save_to_disk("saved")
    for name in ("a.parquet", "saved"):
        first, second, third = contents(source_of(name), ["label", "several"])
        assert (first, second) == ({"label": "yes", "several": ["no", "yes"]}, {"label": "no", "several": []})
        assert third["label"] is None and source_of(name).parts[0].class_names("several") == ["no", "yes"]


def test_a_row_that_python_cannot_hold_and_two_columns_with_one_name_are_reported():
    import pyarrow
    from pyarrow import parquet

    raw = pyarrow.array([b"a", b"\xff", b"c"]).cast(pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": raw}), "a.parquet")
    first, second, third = contents(source_of("a.parquet"))
    assert (first, third) == ({"text": "a"}, {"text": "c"})
    assert str(second).startswith("a.parquet row 2: cannot be read (UnicodeDecodeError")
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), "a.parquet")
    assert "a.parquet: two columns are called 'text'; expected columns with different names" in refused("a.parquet")


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_a_damaged_table_or_one_cut_short_is_refused_or_ends_with_a_problem(name, folder):
    write_any(name, text_rows(3000))
    content = (folder / name).read_bytes()
    damaged = content[:60] + b"\xff" * 340 + content[400:]
    for changed in (content[: len(content) * 2 // 3], damaged if name == "a.parquet" else b""):
        (folder / name).write_bytes(changed)
        try:
            reported = "".join(problems(source_of(name)))
        except UserError as error:
            reported = str(error)
        assert f"{name}: damaged or cut short (" in reported
