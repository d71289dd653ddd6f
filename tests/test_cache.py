"""What the cache remembers of a file is of its content; an entry is whole, or it is not there."""

import errno
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kit import cache
from kit.errors import UserError


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


def test_the_digest_is_of_the_content(tmp_path):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    a, b, c = (cache.file_digest(tmp_path / name) for name in "abc")
    assert a == b != c


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


@pytest.mark.parametrize("name", ["ids.bin", "entry.json"])
@pytest.mark.parametrize("damage", ["cut", "altered", "gone"])
def test_a_damaged_entry_is_none_and_can_be_written_again(folder, name, damage):
    write_entry(folder).finish({})
    content = bytearray((folder / name).read_bytes())
    content[2] ^= 64
    (folder / name).unlink()
    if damage != "gone":
        (folder / name).write_bytes(content[:-1] if damage == "cut" else content)
    assert cache.open_entry(folder) is None
    write_entry(folder).finish({})
    assert cache.open_entry(folder)


def test_what_a_killed_process_left_is_deleted_by_the_next(folder):
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
        pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"),
        cache.cannot_write(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


OPEN_FILES = """
import resource, sys
from kit.cache import allow_open_files
from kit.errors import UserError
allowed, most, num = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
try:
    allow_open_files(num, "dataset")
except UserError as error:
    print(error.problems[0])
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("allowed", "most", "num", "then"),
    [(1024, 4096, 700, 1024), (1024, 4096, 1200, 2224), (1024, 2000, 1200, 2000)],
)
def test_the_limit_of_open_files_is_raised_if_many_must_stay_open(allowed, most, num, then):
    done = subprocess.run([sys.executable, "-c", OPEN_FILES, *map(str, (allowed, most, num))], capture_output=True)
    assert done.stdout.split() == [str(then).encode()]


def test_more_files_than_the_machine_allows_are_refused():
    done = subprocess.run([sys.executable, "-c", OPEN_FILES, "1024", "1024", "1200"], capture_output=True, text=True)
    assert done.stdout.startswith("dataset: 1200 files must stay open, and this machine lets a process open 1024")
    assert "(ulimit -Hn) to 1456" in done.stdout and done.stdout.endswith("\n1024\n")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_an_entry_is_not_taken_for_a_damaged_one_if_too_many_files_are_open(folder, monkeypatch, number):
    writer = cache.Writer(folder)
    writer.append({"ids": np.arange(3)})
    writer.finish({})

    def memmap(*args, **kwargs):
        raise OSError(number, "Too many open files")

    monkeypatch.setattr(np, "memmap", memmap)
    with pytest.raises(UserError, match="Too many open files") as caught:
        cache.open_entry(folder)
    assert "ulimit -n" in caught.value.problems[0].fix
