"""Compressed files: read to the end without unpacking, and refused where they are damaged. Archives are refused."""

import gzip
import random
import re

import pytest
from data_helpers import (
    COMPRESS,
    contents,
    json_lines,
    problems,
    refused,
    rows_of,
    source_of,
    text_rows,
    write_any,
)

from kit.data.read import text
from kit.errors import Problem, UserError

# Damage


@pytest.mark.slow
@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_compressed_file_cut_short_is_reported_and_never_taken_for_complete(suffix, kind, folder):
    name = f"a.{kind}{suffix}"
    rows = [{"text": random.Random(i).randbytes(50).hex(), "n": i} for i in range(20_000)]
    write_any(name, rows)
    whole = (folder / name).read_bytes()
    for num_bytes in (0, 1, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:num_bytes])
        if num_bytes < 2:
            assert re.search(rf"{name}: (cut short|damaged \(BadGzipFile.*\)) after line 0", refused(name))
            continue
        numbers, read = zip(*rows_of(source_of(name)), strict=True)
        assert [row["text"] for row in read[:-1]] == [row["text"] for row in rows[: len(read) - 1]]
        assert isinstance(read[-1], Problem)
        line = int(str(read[-1]).removeprefix(f"{name}: cut short after {'row' if kind == 'json' else 'line'} "))
        assert numbers[-2:] == (line, line + 1)
        assert line > 5000 or suffix in (".bz2", ".xz")  # these decompress much at once
        if suffix == ".gz" and num_bytes > len(whole) // 2:
            assert len(read) == 20_001  # only the checksum was cut


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])  # a checksum in .zst is up to who wrote it
def test_damage_inside_a_compressed_file_is_reported(suffix, folder):
    name = f"a.jsonl{suffix}"
    write_any(name, [{"text": random.Random(i).randbytes(50).hex()} for i in range(20_000)])
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 255
    (folder / name).write_bytes(content)
    try:
        reported = problems(source_of(name))[-1]
    except UserError as error:
        reported = str(error)
    assert f"{name}: damaged (" in reported or f"{name}: cut short" in reported


def test_content_that_does_not_match_its_suffix_is_reported(folder):
    (folder / "a.jsonl.gz").write_bytes(json_lines(text_rows(3)))
    assert "a.jsonl.gz: damaged (BadGzipFile" in refused("a.jsonl.gz")
    (folder / "a.parquet").write_bytes(json_lines(text_rows(3)))
    assert "a.parquet: not a readable parquet file" in refused("a.parquet")


def test_files_one_after_another_in_a_compressed_file_are_one(folder):
    for suffix, compress in COMPRESS.items():
        (folder / f"a.jsonl{suffix}").write_bytes(
            compress(json_lines(text_rows(3))) + compress(json_lines(text_rows(2, 3)))
        )
        assert contents(source_of(f"a.jsonl{suffix}")) == text_rows(5)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"])
def test_an_archive_is_refused_by_its_name(name, folder):
    (folder / name).write_bytes(b"PK")
    assert refused(name).endswith("-> unpack it, and give the folder")
    assert "is a folder without state.json and without data files" in refused(".")


def test_a_line_without_end_ends_the_file(folder, monkeypatch):
    monkeypatch.setattr(text, "MAX_SKIPPED_BYTES", 1 << 20)
    with gzip.open("a.jsonl.gz", "wb") as file:
        file.write(json_lines(text_rows(1)) + bytes(text.MAX_LINE_BYTES + (1 << 22)) + b"\n" + json_lines(text_rows(1)))
    assert "a line of more than" in refused("a.jsonl.gz")
