"""The cache folder: stored hashes of files, and entries of plain arrays.

Promises:

- ``file_digest`` is a hash of the content. The cache stores it with the file's size, times and inode, so an unchanged
  file is not read again. A changed file is.
- An entry appears complete, by one rename, or not at all. Opening it detects each accidental change of a byte that
  leaves a trace in the file's size, times or inode; ``verify`` reads every byte. Hashes do not protect from somebody
  who may write to the cache: they can be computed again. Permissions do. The folder is made for its user alone, and
  ``exposure`` says who else may write to it.
- Arrays are opened as memory maps: opening uses no memory, and all processes of a machine share one copy. Each keeps
  one file open; ``allow_open_files`` makes room for many.
- An open entry is locked until its arrays are gone, so ``remove`` leaves it.
"""

import errno
import fcntl
import json
import os
import resource
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from filelock import FileLock, Timeout

from kit.durable import read_small
from kit.errors import Problem, UserError

ENTRY = "entry.json"
MAX_ENTRY_BYTES = 1 << 32  # it lists every skipped row
# A file that changes twice within one tick of the file system's clock keeps its times, so the digest of a file that
# changed this recently is not stored.
YOUNG_SECONDS = 2.0
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
FEWER_FILES = "raise the limit of open files: ulimit -n"
TOUCH_SECONDS = 3600.0  # how exactly it is known when an entry was last used
SPARE_FILES = 256  # that a process needs besides: those of libraries, connections to other ranks, a checkpoint


def cache_folder() -> Path:
    """The cache folder: ``$KIT_CACHE``, else ``kit`` in the user's cache folder (``$XDG_CACHE_HOME``)."""
    if os.environ.get("KIT_CACHE"):
        return Path(os.path.expanduser(os.environ["KIT_CACHE"]))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kit"


def make_folder(*names: str) -> Path:
    """Make a folder of the cache, named by its path in it. What is new of the cache, only its user may enter.

    Raises:
        OSError: it cannot be made.
    """
    root = cache_folder()
    if not root.is_dir():
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    elif not os.environ.get("KIT_CACHE"):  # made by an earlier version; one in $KIT_CACHE may be that of a team
        with suppress(OSError):
            if root.stat().st_mode & 0o077:
                root.chmod(0o700)
    folder = root.joinpath(*names)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def exposure() -> list[str]:
    """Return a warning if somebody else may write to the cache; empty if nobody can, or only a team.

    A team shares a folder to which its group may write.
    """
    folder = cache_folder()
    try:
        status = folder.stat()
    except OSError:
        return []
    is_of_team = bool(status.st_mode & stat.S_IWGRP) and status.st_gid in (os.getegid(), *os.getgroups())
    if status.st_uid not in (os.geteuid(), 0) and not is_of_team:
        found = f"belongs to another user (id {status.st_uid}), who can change what is learned"
        return [f"warning: the cache {folder} {found}: set KIT_CACHE to a folder of your own"]
    if status.st_mode & stat.S_IWOTH:
        found = "can be written by every user of this machine, who can change what is learned"
        return [f"warning: the cache {folder} {found}: chmod o-w {folder}"]
    return []


def digest(*values: Any) -> str:
    """Return the xxh3-128 hash, as hex, of ``values`` written as JSON. Equal values give equal hashes everywhere."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values).encode())


def file_digest(path: Path) -> str:
    """Return the xxh3-128 hash of a file's content, as hex. Raises ``OSError`` if the file cannot be read."""
    path = path.resolve()
    stored = _stored_digest(path)
    if stored:
        return stored
    with _exclusive("digests"):  # all ranks of a machine ask at once: one reads the file
        return _stored_digest(path) or _read_digest(path)


def _stored_digest(path: Path) -> str | None:
    file = digest_path(path)
    try:
        stored = json.loads(read_small(file))
        if stored["stamp"] != file_stamp(path) or stored["check"] != digest(stored["stamp"], stored["digest"]):
            return None
        _touch(file)
        return str(stored["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def file_stamp(path: Path) -> list[int]:
    """Return a file's size, two times and inode. While these are equal, the content counts as unchanged."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_digest(path: Path) -> str:
    stamp = file_stamp(path)
    value = content_digest(path)
    if stamp == file_stamp(path) and time.time() - max(stamp[1:3]) / 1e9 > YOUNG_SECONDS:
        _store_digest(path, stamp, value)
    return value


def content_digest(path: Path) -> str:
    """Read a file, and return the xxh3-128 hash of its content, as hex. Raises ``OSError``."""
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            state.update(buffer[:size])
    return state.hexdigest()


def digest_path(path: Path) -> Path:
    """Return where the digest of a file is stored."""
    return cache_folder() / "digests" / f"{digest(str(path))}.json"


def _store_digest(path: Path, stamp: list[int], value: str) -> None:
    file = digest_path(path)
    temporary = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # if the cache cannot be written, the file is read again next time
        try:
            entry = {"stamp": stamp, "digest": value, "check": digest(stamp, value)}
            temporary.write_text(json.dumps(entry), encoding="utf-8")
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _exclusive(name: str) -> Iterator[None]:
    with ExitStack() as lock:
        with suppress(OSError):  # without a lock, each process reads the file itself
            lock.enter_context(FileLock(make_folder(name) / ".lock"))
        yield


def _touch(path: Path) -> None:
    """Note that ``path`` was used, in its time of change."""
    with suppress(OSError):  # the cache of another user
        if time.time() - path.stat().st_mtime > TOUCH_SECONDS:
            os.utime(path)


class Writer:
    """Writes the arrays of a cache entry piece by piece into a temporary folder, which ``finish`` renames.

    Only one process may write an entry at a time: use it inside ``locked``.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: where the entry will be."""
        self._folder = folder
        for left in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        remove_leftovers(folder.parent)
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
        entry = {"arrays": arrays, "info": info}
        (self._temporary / ENTRY).write_text(json.dumps({**entry, "digest": _entry_digest(entry)}), encoding="utf-8")
        if self._folder.exists():  # damaged, or written by another machine on a shared disk without working locks
            shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._temporary.rename(self._folder)
        except OSError:
            if not (self._folder / ENTRY).is_file():
                raise
            self.discard()  # the other machine finished first, with the same content
            return
        for name, array in arrays.items():
            path = self._folder.resolve() / f"{name}.bin"
            _store_digest(path, file_stamp(path), array["digest"])

    def discard(self) -> None:
        """Delete what was written so far."""
        for file in self._files.values():
            with suppress(OSError):  # closing writes buffered bytes, and the disk may be full
                file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def read_entry(folder: Path) -> dict[str, Any]:
    """Return what ``entry.json`` of an entry holds: ``arrays`` and ``info``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    entry = json.loads(read_small(folder / ENTRY, MAX_ENTRY_BYTES))
    # Entries of earlier versions have no digest.
    if not isinstance(entry, dict) or entry.get("digest") not in (None, _entry_digest(entry)):
        raise ValueError(f"{folder / ENTRY} was altered")
    return entry


def _entry_digest(entry: Mapping[str, Any]) -> str:
    return digest(*(json.dumps(entry.get(key)) for key in ("arrays", "info")))


def open_entry(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Return the arrays of an entry (read-only memory maps) and its ``info``; None if it is absent or damaged.

    The arrays are locked, shared, until they are gone.
    """
    try:
        entry = read_entry(folder)
        arrays = {}
        for name, array in entry["arrays"].items():
            path = folder / f"{name}.bin"
            columns = [tuple(column) for column in array["dtype"]]  # (name, type); a plain array has one without a name
            dtype = np.dtype(columns if len(columns) > 1 else columns[0][1])
            if dtype.hasobject:  # such an array holds addresses, which numpy would follow
                return None
            with path.open("rb") as file:
                lock_file(file, fcntl.LOCK_SH)
                if path.stat().st_size != array["bytes"] or file_digest(path) != array["digest"]:
                    return None
                # The map keeps a copy of the open file, and with it the lock.
                arrays[name] = np.memmap(file, dtype, mode="r") if array["bytes"] else np.empty(0, dtype)
        _touch(folder)
        return arrays, entry["info"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in TOO_MANY_FILES:
            raise UserError(
                Problem("cache", f"{folder} cannot be opened ({error.strerror})", fix=FEWER_FILES)
            ) from None
        return None


def verify(folder: Path) -> str:
    """Read every byte of an entry. Returns what is wrong with it; an empty string if nothing is."""
    try:
        for name, array in read_entry(folder)["arrays"].items():
            path = folder / f"{name}.bin"
            if path.stat().st_size != array["bytes"]:
                return f"{path} was cut short, or is too long"
            if content_digest(path) != array["digest"]:
                return f"{path} was altered"
        return ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)


def lock_file(file: IO[Any], how: int) -> None:
    """Lock an open file, ``how`` as ``fcntl.flock`` takes it, without waiting. A disk without locks has no lock.

    Raises:
        BlockingIOError: another process has it locked.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def remove(folder: Path) -> bool:
    """Remove an entry, unless a process of any machine has it open. Returns whether it was removed.

    Raises:
        OSError: it may not be removed.
    """
    with ExitStack() as locks:
        try:
            lock = FileLock(f"{folder}.lock", timeout=0)
            locks.enter_context(lock)
            for path in folder.glob("*.bin"):
                lock_file(locks.enter_context(path.open("rb+")), fcntl.LOCK_EX)
        except (Timeout, BlockingIOError):
            return False
        files = [digest_path(path) for path in folder.resolve().glob("*.bin")]
        gone = folder.parent / f".{folder.name}.{os.getpid()}"
        folder.rename(gone)  # from here on it is absent
        for path in files:
            path.unlink(missing_ok=True)
        shutil.rmtree(gone)
        Path(lock.lock_file).unlink(missing_ok=True)  # a process that waits for it sees that, and makes a new one
    return True


def remove_leftovers(samples: Path) -> int:
    """Remove what killed processes left in the folder of all entries: parts of entries, and locks without an entry.

    Returns:
        The number of removed parts of entries. Those that another process may be writing are left.
    """
    num = 0
    names = {path.name for path in samples.iterdir()}
    keys = {name.split(".")[1] for name in names if name.startswith(".")}
    keys |= {name.removesuffix(".lock") for name in names if name.endswith(".lock") and name[:-5] not in names}
    for key in keys - {""}:
        lock = FileLock(samples / f"{key}.lock", timeout=0)
        with suppress(OSError, Timeout), lock:
            for left in samples.glob(f".{key}.*"):
                shutil.rmtree(left, ignore_errors=True)
                num += 1
            if not (samples / key).exists():
                Path(lock.lock_file).unlink(missing_ok=True)
    return num


def read_counts(path: Path) -> dict[int, int]:
    """Return the counts that ``store_counts`` wrote; empty if there are none, or the file is damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        counts = {int(number): int(count) for number, count in stored["counts"].items()}
        return counts if stored["digest"] == _digest_of_counts(path, counts) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def store_counts(path: Path, counts: Mapping[int, int]) -> None:
    """Write counts that take long to compute, each under its number. ``path`` names all that they depend on."""
    temporary = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # if the cache cannot be written, they are computed again
        make_folder()
        path.parent.mkdir(exist_ok=True)
        try:
            stored = {"counts": counts, "digest": _digest_of_counts(path, counts)}
            temporary.write_text(json.dumps(stored), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _digest_of_counts(path: Path, counts: Mapping[int, int]) -> str:
    return digest(path.name, sorted(counts.items()))


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


def delete_old(folder: Path, seconds: float = 86400.0) -> None:
    """Delete the files of a folder of the cache that are older than that; default: a day. Raises ``OSError``."""
    for old in folder.iterdir():
        with suppress(FileNotFoundError):  # another process deleted it
            if time.time() - old.stat().st_mtime > seconds:
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
        found = f"{folder} cannot be written ({error.strerror or error})"
        fix = FEWER_FILES if error.errno in TOO_MANY_FILES else "set KIT_CACHE to a folder with room"
        raise UserError(Problem("cache", found, fix=fix)) from None
