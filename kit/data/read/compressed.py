"""Reads the bytes of a file, and decompresses them. Nothing is unpacked to disk.

Promises:

- Memory use does not grow with the size of the file.
- A file that is cut short or damaged is never taken for a complete one: ``Reader.damage`` says what happened.
"""

import bz2
import gzip
import io
import lzma
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kit.durable import open_regular

BUFFER_BYTES = 1 << 18


def _open_zst(stream: Any) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")


DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


def split_name(name: str) -> tuple[str, str]:
    """Split off the suffixes for format and compression: ``(".jsonl", ".gz")`` for ``train.jsonl.gz``.

    Both are in lower case. A suffix that the name does not have is an empty string.
    """
    stem, suffix = os.path.splitext(name.lower())
    if suffix in DECOMPRESSORS:
        return os.path.splitext(stem)[1], suffix
    return suffix, ""


class Reader(io.BufferedReader):
    """Decompressed bytes up to the end of the content, or up to the first damage. Supports reading only, no seeking."""

    def __init__(self, content: "_UpToDamage") -> None:
        self._content = content
        super().__init__(content, BUFFER_BYTES)

    @property
    def damage(self) -> str:
        """Why the bytes ended too early, such as ``cut short``. Empty if no damage has been met so far."""
        return self._content.damage


class _UpToDamage(io.RawIOBase):
    """A decompressing stream that ends at the first error, and remembers the error, instead of raising it."""

    def __init__(self, stream: Any, damage: str) -> None:
        self._stream = stream
        self.damage = damage

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read1(len(buffer))  # read() would lose the bytes before the damage
        except Exception as error:  # each codec raises exceptions of its own
            is_short = isinstance(error, EOFError) or re.search("(?i)truncated|end of data", str(error))
            self.damage = "cut short" if is_short else f"damaged ({type_and_message(error)})"
            return 0
        buffer[: len(data)] = data
        return len(data)


def type_and_message(error: Exception) -> str:
    """The exception's type and the first line of its message: ``OSError: Truncated``. To quote it in a ``Problem``."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def open_file(path: str) -> Iterator[Reader]:
    """Open a file, compressed or not, for reading from its start.

    Raises whatever the libraries raise if the file cannot be opened at all. Damage that is met later,
    while reading, is not raised: see ``Reader.damage``.
    """
    with ExitStack() as stack:
        stream: Any = stack.enter_context(open_regular(path))
        damage = ""
        if compression := split_name(path)[1]:
            stream = stack.enter_context(DECOMPRESSORS[compression](stream))
            damage = "" if os.path.getsize(path) else "cut short"  # some codecs take an empty file for empty content
        yield stack.enter_context(Reader(_UpToDamage(stream, damage)))
