"""The cache folder: stored hashes of files, and entries of plain arrays.

Promises:

- ``file_digest`` is a hash of the content. The cache stores it with the file's size, times and inode, so an unchanged
  file is not read again. A changed file is.
- An entry appears complete, by one rename, or not at all. Opening it detects if it was cut short or altered.
- Arrays are opened as memory maps: opening uses no memory, and all processes of a machine share one copy. Each keeps
  one file open; ``allow_open_files`` makes room for many.
"""

import errno
import json
import os
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock

from kit.errors import Problem, UserError

ENTRY = "entry.json"
# A file that changes twice within one tick of the file system's clock keeps its times, so the digest of a file that
# changed this recently is not stored.
YOUNG_SECONDS = 2.0
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
FEWER_FILES = "raise the limit of open files: ulimit -n"
SPARE_FILES = 256  # that a process needs besides: those of libraries, connections to other ranks, a checkpoint


def cache_folder() -> Path:
    """The cache folder: ``$KIT_CACHE``, else ``kit`` in the user's cache folder (``$XDG_CACHE_HOME``)."""
    if os.environ.get("KIT_CACHE"):
        return Path(os.path.expanduser(os.environ["KIT_CACHE"]))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kit"


def digest(*values: Any) -> str:
    """Return the xxh3-128 hash, as hex, of ``values`` written as JSON. Equal values give equal hashes everywhere."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values).encode())


def file_digest(path: Path) -> str:
    """Return the xxh3-128 hash of a file's content, as hex. Raises ``OSError`` if the file cannot be read."""
    path = path.resolve()
    stored = _stored_digest(path)
    if stored:
        return stored
    with _exclusive(cache_folder() / "digests"):  # all ranks of a machine ask at once: one reads the file
        return _stored_digest(path) or _read_digest(path)


def _stored_digest(path: Path) -> str | None:
    try:
        stored = json.loads(_digest_path(path).read_text(encoding="utf-8"))
        return stored["digest"] if stored["stamp"] == file_stamp(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def file_stamp(path: Path) -> list[int]:
    """Return a file's size, two times and inode. While these are equal, the content counts as unchanged."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_digest(path: Path) -> str:
    stamp = file_stamp(path)
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            state.update(buffer[:size])
    if stamp == file_stamp(path) and time.time() - max(stamp[1:3]) / 1e9 > YOUNG_SECONDS:
        _store_digest(path, stamp, state.hexdigest())
    return state.hexdigest()


def _digest_path(path: Path) -> Path:
    return cache_folder() / "digests" / f"{digest(str(path))}.json"


def _store_digest(path: Path, stamp: list[int], value: str) -> None:
    file = _digest_path(path)
    temporary = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # if the cache cannot be written, the file is read again next time
        try:
            temporary.write_text(json.dumps({"stamp": stamp, "digest": value}), encoding="utf-8")
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    with ExitStack() as lock:
        with suppress(OSError):  # without a lock, each process reads the file itself
            folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(FileLock(folder / ".lock"))
        yield


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
        self._files: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        self._types: dict[str, np.dtype[Any]] = {}

    def append(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Append a one-dimensional piece to each named array. The first piece of an array sets its dtype."""
        for name, array in arrays.items():
            if name not in self._files:
                self._files[name] = (self._temporary / f"{name}.bin").open("wb")
                self._states[name], self._types[name] = xxhash.xxh3_128(), array.dtype
            assert array.dtype == self._types[name]
            data = np.ascontiguousarray(array).view(np.uint8).data
            self._files[name].write(data)
            self._states[name].update(data)

    def finish(self, info: Mapping[str, Any]) -> None:
        """Complete the entry and move it to its folder. ``info`` is stored as JSON beside the arrays."""
        arrays = {
            name: {"dtype": self._types[name].descr, "bytes": file.tell(), "digest": self._states[name].hexdigest()}
            for name, file in self._files.items()
        }
        for file in self._files.values():
            file.close()
        (self._temporary / ENTRY).write_text(json.dumps({"arrays": arrays, "info": info}), encoding="utf-8")
        if self._folder.exists():  # damaged, or written by another machine on a shared disk without working locks
            shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._temporary.rename(self._folder)
        except OSError:
            if not (self._folder / ENTRY).is_file():
                raise
            self.discard()  # the other machine finished first, with the same content
            return
        for name, entry in arrays.items():
            path = self._folder.resolve() / f"{name}.bin"
            _store_digest(path, file_stamp(path), entry["digest"])

    def discard(self) -> None:
        """Delete what was written so far."""
        for file in self._files.values():
            with suppress(OSError):  # closing writes buffered bytes, and the disk may be full
                file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def open_entry(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Return the arrays of an entry (read-only memory maps) and its ``info``; None if it is absent or damaged."""
    try:
        entry = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
        arrays = {}
        for name, array in entry["arrays"].items():
            path = folder / f"{name}.bin"
            if path.stat().st_size != array["bytes"] or file_digest(path) != array["digest"]:
                return None
            columns = [tuple(column) for column in array["dtype"]]  # (name, type); a plain array has one without a name
            dtype = np.dtype(columns if len(columns) > 1 else columns[0][1])
            arrays[name] = np.memmap(path, dtype, mode="r") if array["bytes"] else np.empty(0, dtype)
        return arrays, entry["info"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, OSError) and error.errno in TOO_MANY_FILES:
            raise UserError(
                Problem("cache", f"{folder} cannot be opened ({error.strerror})", fix=FEWER_FILES)
            ) from None
        return None


def allow_open_files(num: int, where: str) -> None:
    """Let this process keep ``num`` more files open: raise its own limit by that, if the machine allows it.

    Raises:
        UserError: the machine does not allow it. ``where`` is the setting that asks for so many.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num + SPARE_FILES
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return
    if needed > most != resource.RLIM_INFINITY:
        found = f"{num} files must stay open, and this machine lets a process open {most}"
        fix = f"raise the limit (ulimit -Hn) to {needed}; or fewer data sets, since the path of one may be a glob"
        raise UserError(Problem(where, found, fix=fix))
    more = allowed + num
    resource.setrlimit(resource.RLIMIT_NOFILE, (more if most == resource.RLIM_INFINITY else min(more, most), most))


def delete_old(folder: Path) -> None:
    """Delete the files of a folder of the cache that are older than a day. Raises ``OSError``."""
    for old in folder.iterdir():
        if time.time() - old.stat().st_mtime > 86400:
            old.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` among all processes that share the disk; wait for it first.

    Raises ``UserError`` if the lock file cannot be written.
    """
    with cannot_write(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
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
        found = f"{folder} cannot be written ({error.strerror or error})"
        fix = FEWER_FILES if error.errno in TOO_MANY_FILES else "set KIT_CACHE to a folder with room"
        raise UserError(Problem("cache", found, fix=fix)) from None
