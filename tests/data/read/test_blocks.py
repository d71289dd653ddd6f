"""A file as blocks of rows: the same rows from every kind of file, in order, and in flat memory."""

import pickle

import pytest
from data_helpers import contents, json_lines, problems, rows_of, source_of, text_rows, write_any

NAMES = ["a.jsonl", "a.json", "a.csv", "a.tsv.zst", "a.parquet", "file.arrow", "stream.arrow", "A.JSONL"]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_gives_all_rows_in_order(name, monkeypatch):
    monkeypatch.setattr("kit.data.read.blocks.BLOCK_BYTES", 5000)
    rows = text_rows(2300)
    write_any(name, rows)
    source = source_of(name)
    is_cells = ".csv" in name or ".tsv" in name
    if is_cells:
        rows = [{"text": row["text"], "n": str(row["n"])} for row in rows]
    assert contents(source) == rows and source.columns == ["text", "n"]
    assert [number for number, _ in rows_of(source)] == [i + 1 + is_cells for i in range(2300)]
    (part,) = source.parts
    blocks = list(part.blocks(["text"]))
    assert list(part.blocks(["text"])) == blocks and max(block.num_rows for block in blocks) <= 1000
    assert [len(list(part.rows(block))) for block in blocks] == [block.num_rows for block in blocks]
    assert list(part.rows(pickle.loads(pickle.dumps(blocks[-1])))) == list(part.rows(blocks[-1]))


@pytest.mark.parametrize("extra", [0, 1])
def test_a_line_of_more_than_the_allowed_bytes_ends_the_file(extra, folder, monkeypatch):
    monkeypatch.setattr("kit.data.read.blocks.MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr("kit.data.read.text.MAX_LINE_BYTES", 1 << 20)
    row = {"text": "a" * ((1 << 20) - len('{"text": ""}\n') + extra)}
    (folder / "train.jsonl").write_bytes(json_lines([*text_rows(2), row, *text_rows(2)]))
    long = "train.jsonl:3: a line of more than 1 MiB; expected one sample a line"
    assert [text.splitlines()[0] for text in problems(source_of("train.jsonl"))] == [long] * extra
    assert len(contents(source_of("train.jsonl"))) == (3 if extra else 5)
