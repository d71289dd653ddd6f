"""Compressed files: read to the end without unpacking, and refused where they are damaged. Archives are refused."""

import random

import pytest
from data_helpers import contents, json_lines, refused, source_of, text_rows, write_any

from kit.system.errors import UserError


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "a.csv.bz2", "a.jsonl.xz"])
def test_a_compressed_file_cut_short_or_damaged_is_never_taken_for_complete(name, folder):
    write_any(name, [{"text": random.Random(i).randbytes(50).hex(), "n": i} for i in range(20_000)])
    whole = (folder / name).read_bytes()
    middle = len(whole) // 2
    changed = [whole[:num_bytes] for num_bytes in (0, 1, middle, len(whole) - 1)]
    if not name.endswith(".zst"):  # a checksum in it is up to who wrote it
        changed.append(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    for content in changed:
        (folder / name).write_bytes(content)
        try:
            *_, last = contents(source_of(name))
        except UserError as error:
            last = error
        assert f"{name}: damaged or cut short (" in str(last)


def test_content_that_does_not_match_its_suffix_is_reported(folder):
    (folder / "a.jsonl.gz").write_bytes(json_lines(text_rows(3)))
    assert "a.jsonl.gz: damaged or cut short (BadGzipFile" in refused("a.jsonl.gz")


def test_an_archive_is_refused_by_its_name(folder):
    for name in ("a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"):
        (folder / name).write_bytes(b"PK")
        assert refused(name).endswith("-> unpack it, and give the folder")
    assert "is a folder without data files" in refused(".")
