"""Files as rows, in two steps: one process reads blocks of bytes, and any process parses a block into rows.

Promises:

- A row that cannot be used becomes a ``Problem`` with its line or row number, and reading continues after it where
  that is possible.
- If a file is cut short or damaged, its last row is a ``Problem``: no file is taken for a shorter one.
- Memory use does not grow with the size of the file, unless it is a JSON array.
- The same content gives the same blocks every time.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, ClassVar

from kit.data.read.cells import csv_rows
from kit.data.read.compressed import open_file, type_and_message
from kit.data.read.text import MAX_LINE_BYTES, Ending, Row, array_rows, json_row, long_line, rows_of_lines

BLOCK_BYTES = 1 << 18
BLOCK_ROWS = 1000
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive rows of a part, not yet parsed; small enough to send to another process."""

    first: int  # number of its first row or line, from 1
    num_rows: int  # rows or lines, including blank ones
    payload: Any  # bytes of whole lines, an Arrow stream as bytes, or a list of Row


@dataclass(frozen=True)
class Part:
    """A file, or a shard of a dataset. Immutable, and can be pickled to another process. Subclasses read it.

    Attributes:
        has_schema: all rows have the same columns, of which only those asked for are read.
        has_lines: rows are numbered by the line they begin on; if not, by their position.
        name: shown to users: ``data/train.jsonl``.
    """

    has_schema: ClassVar[bool] = False
    has_lines: ClassVar[bool] = True
    name: str

    @property
    def folder(self) -> str:
        """The folder of the file, to which paths in its rows are relative; empty if there is none."""
        return os.path.dirname(os.path.abspath(path)) if (path := getattr(self, "path", "")) else ""

    def class_names(self, column: str) -> list[str]:
        """Return the names of the classes of ``column``, in order; empty if it has none."""
        return []

    def origin(self, number: int) -> str:
        """Name a line or row so that a user can find it: ``train.jsonl:17``, ``train.parquet row 17``."""
        return f"{self.name}:{number}" if self.has_lines else f"{self.name} row {number}"

    def blocks(self, columns: list[str] | None = None) -> Iterator[Block]:
        """Read and decompress the part, and cut it into blocks; parsing is left to ``rows`` where possible.

        ``columns`` are the columns needed, None for all. Text files ignore it: their lines are always read whole.
        """
        number = 1
        try:
            for block in self._read(columns):
                number = block.first + block.num_rows
                yield block
        except Exception as error:
            found = f"damaged or cut short ({type_and_message(error)})"
            yield Block(number, 1, [(number, Ending(self.name, found))])

    def rows(self, block: Block) -> Iterator[Row]:
        """Parse a block of this part: the number of each row, and its content."""
        return iter(block.payload) if isinstance(block.payload, list) else self._parse(block.payload, block.first)

    def _read(self, columns: list[str] | None) -> Iterator[Block]:
        """What ``blocks`` returns, of the whole part. An exception is reported as a problem of the part."""
        raise NotImplementedError

    def _parse(self, payload: bytes, first: int) -> Iterator[Row]:
        """Parse the bytes of a block that begins with number ``first``."""
        raise NotImplementedError


@dataclass(frozen=True)
class _TextPart(Part):
    path: str

    def _read(self, columns: list[str] | None) -> Iterator[Block]:
        with open_file(self.path) as file:
            yield from self._pieces(file)

    def _pieces(self, file: BinaryIO) -> Iterator[Block]:
        """Blocks of whole lines. One that is too long is the last."""
        first, lines, size = 1, list[bytes](), 0
        long: Ending | None = None
        for line in iter(partial(file.readline, MAX_LINE_BYTES + 1), b""):
            if len(line) > MAX_LINE_BYTES:
                long = long_line(f"{self.name}:{first + len(lines)}")
                break
            lines.append(line)
            size += len(line)
            if size >= BLOCK_BYTES:
                yield Block(first, len(lines), b"".join(lines))
                first, lines, size = first + len(lines), [], 0
        if lines:
            yield Block(first, len(lines), b"".join(lines))
        if long:
            number = first + len(lines)
            yield Block(number, 1, [(number, long)])


@dataclass(frozen=True)
class JsonFile(_TextPart):
    """JSON objects, one on each line."""

    def _parse(self, payload: bytes, first: int) -> Iterator[Row]:
        return rows_of_lines(payload, first, self.name, json_row)


@dataclass(frozen=True)
class TextFile(_TextPart):
    """Plain text. Each line is a row, as in ``datasets``."""

    def _parse(self, payload: bytes, first: int) -> Iterator[Row]:
        return rows_of_lines(payload, first, self.name, lambda line, where: {"text": line})


@dataclass(frozen=True)
class ArrayFile(_TextPart):
    """One JSON array of objects, with line breaks anywhere."""

    has_lines: ClassVar[bool] = False

    def _pieces(self, file: BinaryIO) -> Iterator[Block]:
        return _by_thousands(array_rows(file, self.name))


@dataclass(frozen=True)
class CellFile(_TextPart):
    """A CSV or TSV file. Its first row names the columns."""

    delimiter: str

    def _pieces(self, file: BinaryIO) -> Iterator[Block]:
        return _by_thousands(csv_rows(file, self.name, self.delimiter))


def begins_array(path: str) -> bool:
    """Whether the content begins with ``[`` (after spaces), as a JSON array does. False if it cannot be read."""
    try:
        with open_file(path) as file:
            return file.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except Exception:  # reading the rows will report it
        return False


def _by_thousands(rows: Iterator[Row]) -> Iterator[Block]:
    """Group parsed rows into blocks of up to ``BLOCK_ROWS``."""
    while block := list(islice(rows, BLOCK_ROWS)):
        yield Block(block[0][0], len(block), block)
