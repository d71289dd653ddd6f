"""Slices of local data: the rows that ``datasets`` would take, with the numbers that they have in their files."""

import pytest
from data_helpers import contents, json_lines, refused, rows_of, source_of, text_rows, write_any


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json", "a.parquet"])
def test_a_slice_takes_the_rows_that_datasets_takes_and_is_another_data_set(name):
    write_any(name, text_rows(2500))
    for spec, first, last in (
        ("train[:3]", 0, 3),
        ("train[990:2010]", 990, 2010),
        ("train[-2:]", 2498, 2500),
        ("anything[10%:20%]", 250, 500),
    ):
        source = source_of(name, spec)
        assert [row["text"] for row in contents(source)] == [row["text"] for row in text_rows(last - first, first)]
        assert source.digest != source_of(name).digest


def test_a_slice_goes_over_files_and_does_not_count_blank_lines(folder):
    (folder / "a-0.jsonl").write_bytes(b"\n" + json_lines(text_rows(2)) + b"\n")
    (folder / "a-1.jsonl").write_bytes(json_lines(text_rows(3, 2)))
    source = source_of("a-*.jsonl", "train[1:4]")
    assert [(n, row["n"]) for n, row in rows_of(source) if row] == [(3, 1), (1, 2), (2, 3)]
    assert source.origin(0, 3) == "a-0.jsonl:3" and source.columns == ["text", "n"]


def test_a_wrong_slice_and_one_of_a_stream_are_reported(folder):
    write_any("a.jsonl", text_rows(10))
    for spec in ("train[20:]", "train[:0]", "train[a:b]", "train[:150%]", "train[:5"):
        reported = refused("a.jsonl", spec)
        assert reported.startswith(f"error: dataset_split: '{spec}' (") and "a slice such as train[:1000]" in reported
    assert "'train[:5]': a stream has no slices" in refused("a.jsonl", "train[:5]", streaming=True)
