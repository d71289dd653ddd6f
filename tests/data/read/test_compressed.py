"""Compressed files: read to the end without unpacking, and refused where they are damaged. Archives are refused."""

import gzip
import random

import pytest
from data_helpers import COMPRESS, contents, json_lines, problems, refused, source_of, text_rows, write_any

from kit.data.read import text
from kit.errors import Problem, UserError


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "a.csv.gz", "a.jsonl.xz"])
def test_a_compressed_file_cut_short_is_reported_and_never_taken_for_complete(name, folder):
    rows = [{"text": random.Random(i).randbytes(50).hex(), "n": i} for i in range(20_000)]
    write_any(name, rows)
    whole = (folder / name).read_bytes()
    for num_bytes in (0, 1, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:num_bytes])
        if num_bytes < 2:
            assert " after line 0" in refused(name)
            continue
        *read, last = contents(source_of(name))
        assert [row["text"] for row in read] == [row["text"] for row in rows[: len(read)]]
        assert isinstance(last, Problem) and f"{name}: cut short after " in str(last)


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
    assert "a.parquet: damaged or unreadable (ArrowInvalid" in refused("a.parquet")


def test_files_one_after_another_in_a_compressed_file_are_one(folder):
    for suffix, compress in COMPRESS.items():
        (folder / f"a.jsonl{suffix}").write_bytes(
            compress(json_lines(text_rows(3))) + compress(json_lines(text_rows(2, 3)))
        )
        assert contents(source_of(f"a.jsonl{suffix}")) == text_rows(5)


def test_an_archive_is_refused_by_its_name(folder):
    for name in ("a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"):
        (folder / name).write_bytes(b"PK")
        assert refused(name).endswith("-> unpack it, and give the folder")
    assert "is a folder without data files" in refused(".")


def test_a_line_without_end_ends_the_file(folder, monkeypatch):
    monkeypatch.setattr(text, "MAX_SKIPPED_BYTES", 1 << 20)
    with gzip.open("a.jsonl.gz", "wb") as file:
        file.write(json_lines(text_rows(1)) + bytes(text.MAX_LINE_BYTES + (1 << 22)) + b"\n" + json_lines(text_rows(1)))
    assert "a line of more than" in refused("a.jsonl.gz")
