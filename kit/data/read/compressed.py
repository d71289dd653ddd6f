"""Opens a file, compressed or not. Nothing is unpacked to disk, and memory does not grow with the size of the file.

A file that is cut short or damaged is never taken for a complete one: reading it raises what the codec raises.
"""

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kit.system.durable import open_regular

BUFFER_BYTES = 1 << 18


def _open_zst(stream: Any) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(stream, "zstd")


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


def type_and_message(error: Exception) -> str:
    """The exception's type and the first line of its message: ``OSError: Truncated``. To quote it in a ``Problem``."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def open_file(path: str) -> Iterator[io.BufferedReader]:
    """Open a file, compressed or not, for reading from its start. Raises whatever the libraries raise."""
    with ExitStack() as stack:
        stream: Any = stack.enter_context(open_regular(path))
        if compression := split_name(path)[1]:
            if not os.path.getsize(path):  # some codecs take it for empty content
                raise EOFError("an empty file")
            stream = stack.enter_context(DECOMPRESSORS[compression](stream))
        yield stack.enter_context(io.BufferedReader(stream, BUFFER_BYTES))
