"""Slices of local data: the rows that ``datasets`` would take, with the numbers that they have in their files."""

import gzip
import json

import pytest
from data_helpers import cells, contents, json_lines, refused, rows_of, source_of, text_rows, write_any

SLICES = {
    "train[:3]": (0, 3),
    "train[7:]": (7, 10),
    "train[-2:]": (8, 10),
    "train[2:5]": (2, 5),
    "train[10%:20%]": (1, 2),
    "train[:25%]": (0, 2),
    "anything[50%:]": (5, 10),
}


@pytest.mark.parametrize(("spec", "bounds"), SLICES.items())
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json", "a.jsonl.gz"])
def test_a_slice_takes_the_rows_that_datasets_takes(name, spec, bounds, folder):
    rows = text_rows(10)
    content = {"a.csv": cells([["text", "n"], *([row["text"], row["n"]] for row in rows)])}
    content |= {"a.json": json.dumps(rows).encode(), "a.jsonl.gz": gzip.compress(json_lines(rows))}
    (folder / name).write_bytes(content.get(name, json_lines(rows)))
    wanted = [row["text"] for row in rows[slice(*bounds)]]
    assert [row["text"] for row in contents(source_of(name, spec))] == wanted


def test_a_slice_of_a_table_takes_the_same_rows(folder):
    write_any("a.parquet", text_rows(2500))
    assert contents(source_of("a.parquet", "train[990:2010]")) == text_rows(1020, 990)
    assert contents(source_of("a.parquet", "train[50%:]"), ["n"])[0] == {"n": 1250}


def test_a_slice_goes_over_files_and_does_not_count_blank_lines(folder):
    (folder / "a-0.jsonl").write_bytes(b"\n" + json_lines(text_rows(2)) + b"\n")
    (folder / "a-1.jsonl").write_bytes(json_lines(text_rows(3, 2)))
    source = source_of("a-*.jsonl", "train[1:4]")
    assert [(n, row["n"]) for n, row in rows_of(source) if row] == [(3, 1), (1, 2), (2, 3)]
    assert source.origin(0, 3) == "a-0.jsonl:3" and source.columns == ["text", "n"]


def test_a_slice_is_another_data_set(folder):
    write_any("a.jsonl", text_rows(10))
    digests = {source_of("a.jsonl", spec).digest for spec in ("train", "train[:5]", "train[5:]")}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train[20:]", "has no row"),
        ("train[:0]", "'train[:0]' of 10 rows has no row"),
        ("train[a:b]", "expected a slice such as train[:1000]"),
        ("train[:150%]", "'train[:150%]'"),
        ("train[:5", "'train[:5'"),
    ],
)
def test_a_wrong_slice_is_reported(spec, message, folder):
    write_any("a.jsonl", text_rows(10))
    reported = refused("a.jsonl", spec)
    assert reported.startswith("error: dataset_split: ") and message in reported


def test_a_stream_has_no_slices(folder):
    write_any("a.jsonl", text_rows(10))
    assert "'train[:5]': a stream has no slices" in refused("a.jsonl", "train[:5]", streaming=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_what_is_read_as_a_blank_line_is_no_row_of_a_slice(name, folder):
    rows = [json.dumps({"text": text}) if name == "a.jsonl" else text for text in "abc"]
    (folder / name).write_text("\n".join(["\ufeff", "\u00a0", rows[0], "", "\u2003", *rows[1:]]), encoding="utf-8")
    assert [row for row in contents(source_of(name, "train[-1:]")) if row] == [{"text": "c"}]
    assert [row for row in contents(source_of(name, "train[:1]")) if row] == [{"text": "a"}]
