"""Stored hashes of files follow their content; an entry is complete or absent."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from kit.system import cache
from kit.system.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the entry ``ab`` would be."""
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache/ab"


def test_a_file_that_did_not_change_is_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "YOUNG_SECONDS", -1.0)
    file = tmp_path / "file"
    file.write_text("one")
    first = cache.file_digest(file)
    monkeypatch.setattr(cache, "_read_digest", lambda *_: "read")
    assert cache.file_digest(file) == first
    time.sleep(0.02)
    file.write_text("two")
    assert cache.file_digest(file) == "read"


def test_the_digest_of_a_file_that_just_changed_is_not_stored(tmp_path):
    """Changed again within a tick of the clock, it would keep its times."""
    file = tmp_path / "file"
    file.write_text("one")
    cache.file_digest(file)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_the_folder_is_the_one_of_the_environment_or_of_the_user(monkeypatch):
    monkeypatch.setenv("KIT_CACHE", "~/mine")
    assert cache.cache_folder() == Path.home() / "mine"
    monkeypatch.setenv("KIT_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.cache_folder() == Path("/caches/kit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache/kit"


ROWS = np.array([(1, 2.5), (3, 4.5)], dtype=[("start", np.int64), ("weight", np.float32)])


def write_entry(folder):
    writer = cache.Writer(folder)
    writer.append({"ids": np.arange(3, dtype=np.int32), "rows": ROWS[:1], "none": np.empty(0, np.int8)})
    writer.append({"ids": np.arange(3, 5, dtype=np.int32), "rows": ROWS[1:]})
    return writer


def test_an_entry_gives_back_its_arrays_and_is_not_there_before_it_is_finished(folder):
    writer = write_entry(folder)
    assert cache.open_entry(folder) is None and not folder.exists()
    writer.finish({"counts": {"rows": 2}})
    arrays, info = cache.open_entry(folder)
    assert info == {"counts": {"rows": 2}}
    assert arrays["ids"].dtype == np.int32 and arrays["ids"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["rows"].dtype == ROWS.dtype and arrays["rows"].tolist() == ROWS.tolist()
    assert len(arrays["none"]) == 0
    with pytest.raises(ValueError, match="read-only"):
        arrays["ids"][0] = 7
    assert [path.name for path in folder.parent.iterdir() if path.is_dir() and path.name != "digests"] == ["ab"]


def test_no_byte_of_an_entry_can_be_damaged_unnoticed(folder):
    """Also none of the counts and of the layout in entry.json; nor is one cut short, or gone."""
    write_entry(folder).finish({"counts": {"num_rows": 2}})
    for path in (folder / "entry.json", folder / "ids.bin"):
        content = path.read_bytes()
        for i in range(len(content)):
            path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
            assert cache.open_entry(folder) is None, content[i - 10 : i + 10]
        path.write_bytes(content[:-1])
        assert cache.open_entry(folder) is None
        path.unlink()
        assert cache.open_entry(folder) is None
        path.write_bytes(content)
        assert cache.open_entry(folder)
        path.unlink()
        write_entry(folder).finish({"counts": {"num_rows": 2}})  # in the place of what is damaged


def test_an_array_of_addresses_is_not_opened(folder):
    """Not even if somebody computed the hashes again: numpy would follow the addresses."""
    write_entry(folder).finish({})
    entry = cache.read_entry(folder)
    entry["arrays"]["rows"]["dtype"] = [["start", "|O"], ["weight", "<f4"]]
    cache._write_checked(folder / "entry.json", entry)
    assert cache.open_entry(folder) is None


# Who may read and write it


def test_a_new_cache_is_closed_to_other_users(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "new" / "cache"))
    with cache.locked(cache.cache_folder() / "samples/ab"):
        pass
    assert cache.cache_folder().stat().st_mode & 0o777 == 0o700


def test_a_cache_that_anybody_may_write_to_is_warned_of(tmp_path, monkeypatch):
    assert cache.exposure() == []
    (tmp_path / "cache").chmod(0o777)
    (warning,) = cache.exposure()
    assert "every user of this machine" in warning and f"chmod o-w {tmp_path / 'cache'}" in warning
    (tmp_path / "cache").chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    found = cache.exposure()
    assert not found if os.getuid() == 0 else "belongs to another user" in found[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="to give a folder away one must be root")
def test_a_cache_of_another_user_is_warned_of_but_not_one_to_which_the_group_writes(tmp_path):
    os.chown(tmp_path / "cache", 12345, os.getegid())
    assert "belongs to another user (id 12345)" in cache.exposure()[0]
    (tmp_path / "cache").chmod(0o775)
    assert cache.exposure() == []


# Removing


def test_leftovers_of_a_killed_process_are_deleted_by_the_next(folder):
    left = folder.with_name(".ab.1234")
    left.mkdir()
    (left / "ids.bin").touch()
    write_entry(folder).discard()
    assert not left.exists() and not list(folder.parent.glob(".ab.*"))


def test_a_cache_that_cannot_be_written_is_reported_with_a_fix(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"cache: .*file/kit cannot be written.*\n.*set KIT_CACHE"),
        cache.locked(tmp_path / "file/kit/ab"),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"cannot be written or opened \(No space left on device\)"),
        cache.cannot_write(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
