"""Parquet and Arrow: the rows as they were written, and a damaged table is reported."""

import gzip

import pytest
from data_helpers import contents, problems, refused, source_of, text_rows, write_any

from kit.data.read import tables
from kit.errors import UserError


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_of_tables_only_the_needed_columns_are_read(name):
    write_any(name, text_rows(3))
    assert contents(source_of(name), ["text", "else"]) == [{"text": f"ü {i}"} for i in range(3)]
    assert contents(source_of(name), []) == [{}] * 3


def test_objects_of_different_keys_come_as_they_were_written():
    import datasets

    rows = [{"m": [{"role": "user"}, {"role": "tool", "c": [{"a": i}, {"b": "x"}]}]} for i in range(3)]
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet("a.parquet")
    assert contents(source_of("a.parquet")) == rows


def test_a_row_that_python_cannot_hold_is_named():
    import pyarrow
    from pyarrow import parquet

    raw = pyarrow.array([b"a", b"\xff", b"c"]).cast(pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": raw}), "a.parquet")
    first, second, third = contents(source_of("a.parquet"))
    assert (first, third) == ({"text": "a"}, {"text": "c"})
    assert str(second).startswith("a.parquet row 2: cannot be read (UnicodeDecodeError")


def test_two_columns_with_one_name_are_reported():
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), "a.parquet")
    assert "a.parquet: two columns are called 'text'; expected columns with different names" in refused("a.parquet")


def test_a_block_holds_no_more_than_its_rows():
    write_any("stream.arrow", [{"text": "a" * 100}] * 20_000)
    assert max(len(block.payload) for block in source_of("stream.arrow").parts[0].blocks()) < 120_000


def test_a_damaged_page_is_a_problem_of_its_file(folder):
    write_any("a.parquet", text_rows(3000))
    content = bytearray((folder / "a.parquet").read_bytes())
    content[60:400] = b"\xff" * 340
    (folder / "a.parquet").write_bytes(content)
    assert refused("a.parquet").startswith("error: a.parquet: damaged or unreadable (")


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_a_table_cut_short_is_refused_or_ends_with_a_problem(name, folder):
    write_any(name, text_rows(3000))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) * 2 // 3])
    try:
        reported = "".join(problems(source_of(name)))
    except UserError as error:
        reported = str(error)
    assert f"{name}: " in reported and (
        "damaged or unreadable" in reported or "not a readable parquet file" in reported
    )


def test_a_compressed_table_cut_short_is_reported(folder):
    write_any("stream.arrow", text_rows(3000))
    (folder / "stream.arrow.gz").write_bytes(gzip.compress((folder / "stream.arrow").read_bytes()))
    assert contents(source_of("stream.arrow.gz")) == text_rows(3000)
    (folder / "stream.arrow.gz").write_bytes((folder / "stream.arrow.gz").read_bytes()[:-1])
    assert "stream.arrow.gz: damaged or unreadable (EOFError: cut short)" in refused("stream.arrow.gz")


@pytest.mark.parametrize("has_arrow_dictionary", [False, True])
def test_a_long_value_that_many_rows_share_is_in_memory_a_few_times(has_arrow_dictionary, folder, monkeypatch):
    """A file of some hundred bytes would take as much memory as its rows written out."""
    import pyarrow
    from pyarrow import parquet

    column = pyarrow.array(["x" * 50_000] * 2000).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": column if has_arrow_dictionary else column.cast("string")}), "a.parquet")
    monkeypatch.setattr(tables, "MAX_BLOCK_BYTES", 1 << 20)
    source = source_of("a.parquet")
    assert max(block.num_rows for block in source.parts[0].blocks()) <= 2 * tables.FEW_ROWS
    assert contents(source) == [{"text": "x" * 50_000}] * 2000


def test_a_column_that_unpacks_a_thousandfold_is_refused(folder, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"text": ["x" * 5_000_000]}), "a.parquet", compression="zstd", use_dictionary=False
    )
    assert len(contents(source_of("a.parquet"))) == 1  # a small one may
    monkeypatch.setattr(tables, "MAX_BLOCK_BYTES", 1 << 20)
    assert "column 'text' unpacks from" in refused("a.parquet")
    columns = {"text": ["a"], "embedding": [[0.0] * 500_000]}
    parquet.write_table(pyarrow.table(columns), "zeros.parquet", compression="zstd", use_dictionary=False)
    assert len(contents(source_of("zeros.parquet"))) == 1


def test_a_packed_table_is_unpacked_up_to_a_share_of_the_memory(folder, monkeypatch):
    write_any("a.parquet", text_rows(3))
    with gzip.open("a.parquet.gz", "wb") as file:
        file.write((folder / "a.parquet").read_bytes())
    assert len(contents(source_of("a.parquet.gz"))) == 3
    monkeypatch.setattr(tables, "_quarter_of_memory", lambda: 100)
    assert "unpack it" in refused("a.parquet.gz")
