"""Files that survive a loss of power: their content is on the disk before their final name is.

And files of others, read with a bound: one that is no regular file, or too large, raises ``OSError``.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

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

    Writes to a temporary file, syncs it, and renames it.
    """
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


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
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MiB", str(path))
    return content.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")
