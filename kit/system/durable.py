"""Files that survive a power loss, and folders in which another user may have put links or special files.

Promises:

- The content of a file is on the disk before its final name is.
- Nothing is written through a link or into a special file, only at the given path. The folder of that path may be a
  link.
- Files of others are read with a bound: one that is no regular file, or too large, raises ``OSError``.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable
from io import BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO, TextIO

SMALL_BYTES = 1 << 26  # far more than any record, config or index of a model has


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_tree(folder: Path) -> None:
    """Call ``sync`` for each file and folder in ``folder``, then for ``folder`` itself."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically: a reader, or a restart after a crash, finds the old text or the new text.

    Writes to a temporary file, syncs it, and renames it. Several processes may do this at the same time. A link at
    ``path`` is replaced; its target stays as it is.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        with create(temporary) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def is_leftover(name: str, of: Iterable[str]) -> bool:
    """Return whether ``name`` is that of a temporary file, which a kill left, for one of the files ``of``."""
    return name.endswith("partial") and any(name.startswith(f".{file}.") for file in of)


def create(path: Path) -> BufferedWriter:
    """Create a new file and open it for bytes. A file or link at ``path`` is deleted first.

    Raises:
        OSError: it cannot be created, also because ``path`` is a folder.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb")


def open_to_append(path: Path) -> TextIO:
    """Open a text file to append to it; it is created if there is none.

    Raises:
        OSError: it cannot be opened, also because it is a link or no regular file. (A pipe would wait for a reader.)
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(file, "a", encoding="utf-8")


def staging_of(folder: Path) -> Path:
    """Return the temporary folder in which ``folder`` is written before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


def make_afresh(folder: Path) -> None:
    """Make an empty folder, and the folders above it. Anything at its path is deleted first."""
    remove(folder)
    folder.mkdir(parents=True)


def remove(path: Path) -> None:
    """Delete a file, or a folder with all that is in it; of a link the link alone. Nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading bytes. Raises ``OSError``, without waiting, if it is a pipe, a device or a socket."""
    # O_NONBLOCK: else the call would wait until another process writes into a pipe. Regular files ignore it.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(file, "rb")


def read_small(path: str | Path, max_bytes: int = SMALL_BYTES, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8 that should be small, with any line break as ``\\n``.

    Raises:
        OSError: it cannot be opened, is not a regular file, or has more than ``max_bytes``.
        UnicodeDecodeError: it is not UTF-8, and ``errors`` is ``strict``.
    """
    with open_regular(path) as file:
        content = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)  # it takes memory for all of these
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MiB", str(path))
    return content.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none, or it cannot be read."""
    try:
        value = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
