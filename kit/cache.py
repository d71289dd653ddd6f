"""The cache folder: content hashes that are remembered, and entries of plain arrays that are complete or absent.

Promises:

- ``file_digest`` is of the content. It is remembered under size, times and inode, so that a file that was not touched
  is not read again; a file that was touched is.
- An entry appears whole, by one rename, or not at all. One that was cut short or altered is noticed when it is opened.
- Arrays are opened as memory maps: opening costs no memory, and all processes of a machine share one copy.
"""

import json
import os
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
# A file changed twice within a tick of its clock would keep its times: what is so young is not remembered.
YOUNG_SECONDS = 2.0


def cache_folder() -> Path:
    """``$KIT_CACHE``, or ``kit`` in the user's cache folder."""
    if os.environ.get("KIT_CACHE"):
        return Path(os.path.expanduser(os.environ["KIT_CACHE"]))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kit"


def digest(*values: Any) -> str:
    """Of values that JSON can hold."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values).encode())


def file_digest(path: Path) -> str:
    """xxh3-128 of a file's content, as hex. Raises ``OSError``."""
    path = path.resolve()
    known = _remembered(path)
    if known:
        return known
    with _one_at_a_time(cache_folder() / "digests"):  # the ranks of a machine ask together: one reads, all remember
        return _remembered(path) or _read_digest(path)


def _remembered(path: Path) -> str | None:
    try:
        known = json.loads(_memory(path).read_text(encoding="utf-8"))
        return known["digest"] if known["stamp"] == file_stamp(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def file_stamp(path: Path) -> list[int]:
    """Size, times and inode: as long as they are the same, so is the content."""
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
        _remember(path, stamp, state.hexdigest())
    return state.hexdigest()


def _memory(path: Path) -> Path:
    return cache_folder() / "digests" / f"{digest(str(path))}.json"


def _remember(path: Path, stamp: list[int], known: str) -> None:
    memory = _memory(path)
    aside = memory.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a cache that cannot be written costs time, no more
        try:
            aside.write_text(json.dumps({"stamp": stamp, "digest": known}), encoding="utf-8")
            aside.replace(memory)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    with ExitStack() as lock:
        with suppress(OSError):  # where no lock can be had, each reads for itself
            folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(FileLock(folder / ".lock"))
        yield


class Writer:
    """Arrays of an entry, written piece by piece next to where the entry will be; alone there, see ``locked``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for left in folder.parent.glob(f".{folder.name}.*"):  # by one that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._aside = folder.parent / f".{folder.name}.{os.getpid()}"
        self._aside.mkdir()
        self._files: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        self._types: dict[str, np.dtype[Any]] = {}

    def append(self, arrays: Mapping[str, np.ndarray]) -> None:
        """One-dimensional pieces; each name keeps its dtype."""
        for name, array in arrays.items():
            if name not in self._files:
                self._files[name] = (self._aside / f"{name}.bin").open("wb")
                self._states[name], self._types[name] = xxhash.xxh3_128(), array.dtype
            assert array.dtype == self._types[name]
            data = np.ascontiguousarray(array).view(np.uint8).data
            self._files[name].write(data)
            self._states[name].update(data)

    def finish(self, info: Mapping[str, Any]) -> None:
        """Make the entry appear, with ``info``, which JSON can hold."""
        arrays = {
            name: {"dtype": self._types[name].descr, "bytes": file.tell(), "digest": self._states[name].hexdigest()}
            for name, file in self._files.items()
        }
        for file in self._files.values():
            file.close()
        (self._aside / ENTRY).write_text(json.dumps({"arrays": arrays, "info": info}), encoding="utf-8")
        if self._folder.exists():  # damaged, or another machine's on a shared disk whose locks do not hold
            shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._aside.rename(self._folder)
        except OSError:
            if not (self._folder / ENTRY).is_file():
                raise
            self.discard()  # the other machine was first, with the same content
            return
        for name, about in arrays.items():
            path = self._folder.resolve() / f"{name}.bin"
            _remember(path, file_stamp(path), about["digest"])

    def discard(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # closing writes what is left, where there may be no room
                file.close()
        shutil.rmtree(self._aside, ignore_errors=True)


def open_entry(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Arrays, memory-mapped and read-only, and info; None where the entry is absent or damaged."""
    try:
        entry = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
        arrays = {}
        for name, about in entry["arrays"].items():
            path = folder / f"{name}.bin"
            if path.stat().st_size != about["bytes"] or file_digest(path) != about["digest"]:
                return None
            dtype = np.dtype([tuple(column) for column in about["dtype"]] if len(about["dtype"]) > 1 else
                             about["dtype"][0][1])  # fmt: skip
            arrays[name] = np.memmap(path, dtype, mode="r") if about["bytes"] else np.empty(0, dtype)
        return arrays, entry["info"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone at ``folder`` among all processes that share the disk. Raises ``UserError`` if it cannot be written."""
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
    """Turn what goes wrong in writing to the cache into a problem with a way out."""
    try:
        yield
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror or error})"
        raise UserError(Problem("cache", found, fix="set KIT_CACHE to a folder with room")) from None
