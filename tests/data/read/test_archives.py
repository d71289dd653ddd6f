"""Compressed files and archives: read to the end without unpacking, and refused where they are damaged or harmful."""

import gzip
import random
import re
import tarfile
import zipfile

import pytest
from data_helpers import (
    COMPRESS,
    contents,
    json_lines,
    pack_zip,
    problems,
    refused,
    rows_of,
    source_of,
    tar_bytes,
    text_rows,
    write_any,
)

from kit.data.read import archives, text
from kit.data.read.sources import read_rows
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
    (folder / "a.zip").write_bytes(json_lines(text_rows(3)))
    assert "a.zip: a damaged archive, or cut short" in refused("a.zip")
    (folder / "a.tar").write_bytes(json_lines(text_rows(300)))
    assert "a.tar: a damaged archive, or cut short" in refused("a.tar")


def test_files_one_after_another_in_a_compressed_file_are_one(folder):
    for suffix, compress in COMPRESS.items():
        (folder / f"a.jsonl{suffix}").write_bytes(
            compress(json_lines(text_rows(3))) + compress(json_lines(text_rows(2, 3)))
        )
        assert contents(source_of(f"a.jsonl{suffix}")) == text_rows(5)


# Archives


EVIL = [
    "../train.jsonl",
    "data/../../train.jsonl",
    "/tmp/train.jsonl",
    "..\\train.jsonl",
    "C:\\train.jsonl",
    "C:t.jsonl",
]


@pytest.mark.parametrize("member", EVIL)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_member_outside_its_folder_refuses_the_archive(member, kind, folder):
    members = {"good.jsonl": json_lines(text_rows(3)), member: json_lines(text_rows(3))}
    if kind == "zip":
        pack_zip(folder / "a.zip", members)
    else:
        (folder / "a.tar").write_bytes(tar_bytes(members))
    reported = refused(f"a.{kind}")
    assert f"a.{kind}!{member}: a path that leaves the folder it is unpacked in" in reported


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_link_refuses_a_tar(kind):
    with tarfile.open("a.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("train.jsonl")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert "a.tar.gz!train.jsonl: a link or a special file; expected an archive of plain files" in refused("a.tar.gz")


def test_a_link_refuses_a_zip():
    with zipfile.ZipFile("a.zip", "w") as archive:
        info = zipfile.ZipInfo("train.jsonl")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    assert "a.zip!train.jsonl: a link or a special file" in refused("a.zip")


def test_an_encrypted_member_is_reported(folder):
    pack_zip(folder / "a.zip", {"train.jsonl": json_lines(text_rows(3))})
    content = bytearray((folder / "a.zip").read_bytes())
    for signature, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        content[content.index(signature) + flags] |= 1
    (folder / "a.zip").write_bytes(content)
    assert "a.zip!train.jsonl: encrypted" in refused("a.zip")


def test_an_archive_without_data_is_reported(folder):
    hidden = {"README.md": b"a", "__MACOSX/._train.jsonl": b"a", ".train.jsonl": b"a"}
    pack_zip(folder / "a.zip", hidden)
    assert "a.zip: an archive without a data file; expected files that end in .jsonl" in refused("a.zip")
    (folder / "a.tar").write_bytes(tar_bytes(hidden))
    assert "a.tar: an archive without a data file" in refused("a.tar")


def test_a_tar_of_a_whole_folder_is_read(folder):
    """As `tar -C folder .` packs it, with `./` before each name."""
    (folder / "a.tar").write_bytes(tar_bytes({"./train.jsonl": json_lines(text_rows(3)), "./.hidden.jsonl": b"a"}))
    assert contents(source_of("a.tar")) == text_rows(3)


@pytest.mark.slow
def test_members_may_be_compressed_or_tables(folder):
    write_any("a.parquet", text_rows(3))
    members = {"a.parquet": (folder / "a.parquet").read_bytes(), "b.jsonl.gz": gzip.compress(json_lines(text_rows(3)))}
    pack_zip(folder / "a.zip", members)
    (folder / "a.tgz").write_bytes(gzip.compress(tar_bytes(members)))
    for name in ("a.zip", "a.tgz"):
        assert contents(source_of(name)) == text_rows(3) * 2


@pytest.mark.parametrize("cut", [700, 1536, 2048, 3000])  # in a member, at its end, between members, in a header
def test_a_tar_cut_short_is_reported(cut, folder):
    content = tar_bytes({"0.jsonl": b'{"n": 1}\n' * 100, "1.jsonl": b'{"n": 1}\n' * 100})
    (folder / "a.tar").write_bytes(content[:cut])
    assert "a.tar: a damaged archive, or cut short" in refused("a.tar")


def test_members_of_a_tar_can_be_read_in_any_order(folder):
    members = {f"{i}.jsonl": json_lines(text_rows(50, 50 * i)) for i in range(4)}
    (folder / "a.tgz").write_bytes(gzip.compress(tar_bytes(members)))
    source = source_of("a.tgz")
    for order in ([2, 0, 1, 3], [3, 3, 0]):
        for i in order:
            assert [row for _, _, row in read_rows(source.parts[i : i + 1])] == text_rows(50, 50 * i)
    many = [part.blocks() for part in source.parts]
    rows = [list(part.rows(block)) for part, blocks in zip(source.parts, many, strict=True) for block in blocks]
    assert [row for block in rows for _, row in block if row] == text_rows(200)


def test_a_compressed_tar_is_decompressed_once_for_all_members(folder, monkeypatch):
    members = {f"{i}.jsonl": json_lines(text_rows(50, 50 * i)) for i in range(6)}
    (folder / "a.tgz").write_bytes(gzip.compress(tar_bytes(members)))
    source = source_of("a.tgz")
    open_tar, calls = archives._open_tar, []
    monkeypatch.setattr(archives, "_open_tar", lambda path: calls.append(path) or open_tar(path))
    assert contents(source) == text_rows(300)
    assert len(calls) == 1


def test_the_list_of_a_zip_is_read_once_for_all_members(folder, monkeypatch):
    with zipfile.ZipFile("a.zip", "w") as archive:
        for i in range(50):
            archive.writestr(f"{i:02}.jsonl", json_lines(text_rows(1, i)))
    opened = []
    real = zipfile.ZipFile

    def counting(*args):
        opened.append(args)
        return real(*args)

    monkeypatch.setattr(zipfile, "ZipFile", counting)
    assert contents(source_of("a.zip")) == [row for i in range(50) for row in text_rows(1, i)]
    assert len(opened) == 2


def test_a_long_header_of_a_tar_is_not_read(folder):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 32
    (folder / "a.tar").write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 16))
    assert "a header of 4294967296 bytes" in refused("a.tar")


def test_a_line_without_end_ends_the_file(folder, monkeypatch):
    monkeypatch.setattr(text, "MAX_SKIPPED_BYTES", 1 << 20)
    with gzip.open("a.jsonl.gz", "wb") as file:
        file.write(json_lines(text_rows(1)) + bytes(text.MAX_LINE_BYTES + (1 << 22)) + b"\n" + json_lines(text_rows(1)))
    assert "a line of more than" in refused("a.jsonl.gz")
