"""The cache folder: stored hashes of files, and entries of plain arrays.

Promises:

- ``file_digest`` is a hash of the content. The cache stores it with the file's size, times and inode, so an unchanged
  file is not read again. A changed file is.
- An entry appears complete, by one rename, or not at all. Opening it detects each change of a byte that leaves a trace
  in the file's size, times or inode; ``is_whole`` reads every byte. Hashes do not protect from somebody who may write
  to the cache: they can be computed again. Permissions do. The folder is made for its user alone, and ``exposure`` says
  who else may write to it.
- Arrays are opened as memory maps: opening uses no memory, and all processes of a machine share one copy.
"""

import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from filelock import FileLock

from kit.system.durable import read_small
from kit.system.errors import UserError

ENTRY = "entry.json"
MAX_ENTRY_BYTES = 1 << 32  # it lists every skipped row
# A file that changes twice within one tick of the file system's clock keeps its times, so the digest of a file that
# changed this recently is not stored.
YOUNG_SECONDS = 2.0


def cache_folder() -> Path:
    """The cache folder: ``$KIT_CACHE``, else ``kit`` in the user's cache folder (``$XDG_CACHE_HOME``)."""
    if os.environ.get("KIT_CACHE"):
        return Path(os.path.expanduser(os.environ["KIT_CACHE"]))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kit"


def make_folder(*names: str) -> Path:
    """Make a folder of the cache, named by its path in it. A new cache is for its user alone (mode 700).

    Raises:
        OSError: it cannot be made.
    """
    root = cache_folder()
    if not root.is_dir():
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    folder = root.joinpath(*names)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def exposure() -> list[str]:
    """Return a warning if another user may write to the cache; empty if nobody can, or only a team.

    A team shares a folder to which its group may write.
    """
    folder = cache_folder()
    try:
        status = folder.stat()
    except OSError:
        return []
    is_of_team = bool(status.st_mode & stat.S_IWGRP) and status.st_gid in (os.getegid(), *os.getgroups())
    if status.st_uid not in (os.geteuid(), 0) and not is_of_team:
        found = f"belongs to another user (id {status.st_uid}), who can change the training data"
        return [f"warning: the cache {folder} {found}: set KIT_CACHE to a folder of your own"]
    if status.st_mode & stat.S_IWOTH:
        found = "can be written by every user of this machine, who can change the training data"
        return [f"warning: the cache {folder} {found}: chmod o-w {folder}"]
    return []


def digest(*values: Any) -> str:
    """Return the xxh3-128 hash, as hex, of ``values`` written as JSON. Equal values give equal hashes everywhere."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values).encode())


def file_digest(path: Path) -> str:
    """Return the xxh3-128 hash of a file's content, as hex. Raises ``OSError`` if the file cannot be read."""
    path = path.resolve()
    if stored := _stored_digest(path):
        return stored
    with ExitStack() as lock:  # all ranks of a machine ask at once: one reads the file
        with suppress(OSError):  # without a lock, each process reads the file itself
            lock.enter_context(FileLock(make_folder("digests") / ".lock"))
        return _stored_digest(path) or _read_digest(path)


def file_stamp(path: Path) -> list[int]:
    """Return a file's size, two times and inode. While these are equal, the content counts as unchanged."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _stored_digest(path: Path) -> str | None:
    try:
        stored = _read_checked(_digest_file(path))
        return str(stored["digest"]) if stored["stamp"] == file_stamp(path) else None
    except (OSError, ValueError):
        return None


def _read_digest(path: Path) -> str:
    stamp = file_stamp(path)
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            state.update(buffer[:size])
    value = state.hexdigest()
    if stamp == file_stamp(path) and time.time() - max(stamp[1:3]) / 1e9 > YOUNG_SECONDS:
        _store_digest(path, stamp, value)
    return value


def _digest_file(path: Path) -> Path:
    return cache_folder() / "digests" / f"{digest(str(path))}.json"


def _store_digest(path: Path, stamp: list[int], value: str) -> None:
    file = _digest_file(path)
    temporary = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # if the cache cannot be written, the file is read again next time
        make_folder("digests")
        _write_checked(temporary, {"stamp": stamp, "digest": value})
        temporary.replace(file)


def _write_checked(path: Path, value: Any) -> None:
    """Write JSON with its own hash before it, by which ``_read_checked`` knows damage."""
    text = json.dumps(value)
    path.write_text(f"{digest(text)} {text}", encoding="utf-8")


def _read_checked(path: Path) -> Any:
    found, _, text = read_small(path, MAX_ENTRY_BYTES).partition(" ")
    if found != digest(text):
        raise ValueError(f"{path} is damaged")
    return json.loads(text)


class Writer:
    """Writes the arrays of a cache entry piece by piece into a temporary folder, which ``finish`` renames.

    Only one process may write an entry at a time: use it inside ``locked``.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: where the entry will be."""
        self._folder = folder
        for left in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._temporary = folder.parent / f".{folder.name}.{os.getpid()}"
        self._temporary.mkdir()
        self._arrays: dict[str, tuple[BinaryIO, Any, np.dtype[Any]]] = {}  # file, state of the hash, type of each

    def append(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Append a one-dimensional piece to each named array. The first piece of an array sets its dtype."""
        for name, array in arrays.items():
            if name not in self._arrays:
                opened = (self._temporary / f"{name}.bin").open("wb")
                self._arrays[name] = opened, xxhash.xxh3_128(), array.dtype
            file, state, dtype = self._arrays[name]
            assert array.dtype == dtype
            data = np.ascontiguousarray(array).view(np.uint8).data
            file.write(data)
            state.update(data)

    def finish(self, info: Mapping[str, Any]) -> None:
        """Complete the entry and move it to its folder. ``info`` is stored as JSON next to the arrays."""
        arrays = {}
        for name, (file, state, dtype) in self._arrays.items():
            arrays[name] = {"dtype": dtype.descr, "bytes": file.tell(), "digest": state.hexdigest()}
            file.close()
        _write_checked(self._temporary / ENTRY, {"arrays": arrays, "info": info})
        if self._folder.exists():  # damaged, or written by another machine on a shared disk without working locks
            shutil.rmtree(self._folder, ignore_errors=True)
        self._temporary.rename(self._folder)
        for name, array in arrays.items():
            path = self._folder.resolve() / f"{name}.bin"
            _store_digest(path, file_stamp(path), array["digest"])

    def discard(self) -> None:
        """Delete all files written so far."""
        for file, _, _ in self._arrays.values():
            with suppress(OSError):  # closing writes buffered bytes, and the disk may be full
                file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def store(folder: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Write an entry of one piece, unless it is there. Raises ``UserError`` if the cache cannot be written."""
    with locked(folder), cannot_write(folder.parent):
        if open_entry(folder):  # another machine has stored it on a shared disk
            return
        writer = Writer(folder)
        try:
            writer.append(arrays)
            writer.finish({"about": about})
        except BaseException:
            writer.discard()
            raise


def read_entry(folder: Path) -> dict[str, Any]:
    """Return the content of an entry's ``entry.json``: ``arrays`` and ``info``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    entry: dict[str, Any] = _read_checked(folder / ENTRY)
    return entry


def open_entry(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Return the arrays of an entry (read-only memory maps) and its ``info``; None if it is absent or damaged."""
    try:
        entry = read_entry(folder)
        arrays = {}
        for name, array in entry["arrays"].items():
            path = folder / f"{name}.bin"
            columns = [tuple(column) for column in array["dtype"]]  # (name, type); a plain array has one without a name
            dtype = np.dtype(columns if len(columns) > 1 else columns[0][1])
            if dtype.hasobject:  # such an array holds addresses, which numpy would follow
                return None
            if path.stat().st_size != array["bytes"] or file_digest(path) != array["digest"]:
                return None
            arrays[name] = np.memmap(path, dtype, mode="r") if array["bytes"] else np.empty(0, dtype)
        with suppress(OSError):  # the cache of another user
            os.utime(folder)  # when it was last used
        return arrays, entry["info"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise _not_writable(folder, error) from None
        return None


def is_whole(folder: Path) -> bool:
    """Return whether an entry holds the bytes that were written: all of them are read, whatever a file's times say."""
    try:
        arrays = read_entry(folder)["arrays"]
        return all(
            _read_digest((folder / f"{name}.bin").resolve()) == array["digest"] for name, array in arrays.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def delete_old(folder: Path, seconds: float = 86400.0) -> None:
    """Delete the files of a folder of the cache that are older than that; default: a day. Raises ``OSError``."""
    for old in folder.iterdir():
        with suppress(FileNotFoundError):  # another process deleted it
            if old.is_file() and time.time() - old.stat().st_mtime > seconds:
                old.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` among all processes that share the disk; wait for it first.

    Raises ``UserError`` if the lock file cannot be written.
    """
    with cannot_write(folder.parent):
        make_folder(folder.parent.name)
        lock = FileLock(f"{folder}.lock")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def cannot_write(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` raised while writing to the cache into a ``UserError`` that says how to fix it."""
    try:
        yield
    except OSError as error:
        raise _not_writable(folder, error) from None


def _not_writable(folder: Path, error: OSError) -> UserError:
    fix = "set KIT_CACHE to a folder with room"
    if error.errno == errno.EMFILE:
        fix = "raise the limit of open files (ulimit -n): each dataset keeps some open"
    return UserError("cache", f"{folder} cannot be written or opened ({error.strerror or error})", fix=fix)
