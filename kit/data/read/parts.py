"""Files as rows, in two steps: one process reads blocks of bytes, and any process parses a block into rows.

Promises:

- A row that cannot be used becomes a ``Problem`` with its line or row number, and reading continues after it where
  that is possible.
- If a file is cut short or damaged, its last row is a ``Problem``: no file is taken for a shorter one.
- Memory use does not grow with the size of the file, unless it is a JSON array.
- The same content gives the same blocks every time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from kit.data.read.cells import csv_rows
from kit.data.read.compressed import Reader, open_file, type_and_message
from kit.data.read.text import (
    MAX_LINE_BYTES,
    Ending,
    Row,
    array_rows,
    json_rows,
    long_line,
    skip_line,
    text_rows,
)

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
    """A file, or a shard of a data set. Immutable, and can be pickled to another process. Subclasses read it.

    Attributes:
        has_schema: all rows have the same columns, of which only those asked for are read.
        name: shown to users: ``data/train.jsonl``.
    """

    has_schema: ClassVar[bool]
    name: str

    @property
    def has_lines(self) -> bool:
        """Whether rows are numbered by the line they begin on; if not, by their position."""
        return not self.has_schema

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
            yield _ending(self.name, number, f"damaged or unreadable ({type_and_message(error)})")

    def rows(self, block: Block) -> Iterator[Row]:
        """Parse a block of this part: the number of each row, and its content."""
        return iter(block.payload) if isinstance(block.payload, list) else self._parse(block.payload, block.first)

    def _read(self, columns: list[str] | None) -> Iterator[Block]:
        """What ``blocks`` returns, of the whole part. An exception is reported as a problem of the part."""
        raise NotImplementedError

    def _parse(self, payload: bytes, first: int) -> Iterator[Row]:
        """Parse the bytes of a block that begins with number ``first``."""
        raise NotImplementedError


def origin(part: Part, number: int) -> str:
    """Name a line or row so that a user can find it: ``train.jsonl:17``, ``train.parquet row 17``."""
    return f"{part.name}:{number}" if part.has_lines else f"{part.name} row {number}"


def _ending(name: str, number: int, found: str) -> Block:
    """The last block of a part that could not be read to its end."""
    return Block(number, 1, [(number, Ending(name, found))])


@dataclass(frozen=True)
class _TextPart(Part):
    has_schema: ClassVar[bool] = False
    path: str

    def _read(self, columns: list[str] | None) -> Iterator[Block]:
        last = 0  # number of the last line or row
        with open_file(self.path) as reader:
            for first, num_rows, payload in self._pieces(reader):
                last = payload[-1][0] if isinstance(payload, list) else first + num_rows - 1
                yield Block(first, num_rows, payload)
            if reader.damage:
                unit = "line" if self.has_lines else "row"
                yield _ending(self.name, last + 1, f"{reader.damage} after {unit} {last}")

    def _pieces(self, reader: Reader) -> Iterator[tuple[int, int, Any]]:
        """Cut the content into blocks: ``first``, ``num_rows`` and ``payload`` of each, see ``Block``."""
        return _whole_lines(reader, self.name)


@dataclass(frozen=True)
class JsonFile(_TextPart):
    """JSON objects, one on each line; or one JSON array of objects, with line breaks anywhere."""

    is_array: bool

    @property
    def has_lines(self) -> bool:
        """Whether rows are numbered by line; the rows of an array are numbered by position."""
        return not self.is_array

    def _pieces(self, reader: Reader) -> Iterator[tuple[int, int, Any]]:
        return _by_thousands(array_rows(reader, self.name)) if self.is_array else _whole_lines(reader, self.name)

    def _parse(self, payload: bytes, first: int) -> Iterator[Row]:
        return json_rows(payload, first, self.name)


def _whole_lines(reader: Reader, name: str) -> Iterator[tuple[int, int, Any]]:
    """Blocks of whole lines. One that is too long becomes a block of its own, which holds a ``Problem``."""
    first = 1
    while lines := reader.read(BLOCK_BYTES):
        num_whole = lines.rfind(b"\n") + 1  # bytes up to the last line break; the rest is the start of a line
        num_begun = len(lines) - num_whole  # bytes of the line that is not complete
        rest = b""
        if num_begun:
            rest = reader.readline(MAX_LINE_BYTES + 1 - num_begun)
        is_incomplete = num_begun > 0 and not rest.endswith(b"\n")
        is_long = is_incomplete and num_begun + len(rest) > MAX_LINE_BYTES
        if is_long:
            skip_line(reader)
        if is_long or (is_incomplete and reader.damage):
            lines = lines[:num_whole]
        else:
            lines += rest
        if lines:
            num_lines = lines.count(b"\n") + (not lines.endswith(b"\n"))
            yield first, num_lines, lines
            first += num_lines
        if is_long:
            yield first, 1, [(first, long_line(f"{name}:{first}"))]
            first += 1


def begins_array(path: str) -> bool:
    """Whether the content begins with ``[`` (after spaces), as a JSON array does. False if it cannot be read."""
    try:
        with open_file(path) as reader:
            return reader.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except Exception:  # reading the rows will report it
        return False


@dataclass(frozen=True)
class TextFile(_TextPart):
    """Plain text. Each line is a row, as in ``datasets``."""

    def _parse(self, payload: bytes, first: int) -> Iterator[Row]:
        return text_rows(payload, first, self.name)


@dataclass(frozen=True)
class CellFile(_TextPart):
    """A CSV or TSV file. Its first row names the columns."""

    delimiter: str

    def _pieces(self, reader: Reader) -> Iterator[tuple[int, int, Any]]:
        return _by_thousands(csv_rows(reader, self.name, self.delimiter))


def _by_thousands(rows: Iterator[Row]) -> Iterator[tuple[int, int, list[Row]]]:
    """Group parsed rows into blocks of up to ``BLOCK_ROWS``."""
    while block := list(islice(rows, BLOCK_ROWS)):
        number, _ = block[0]
        yield number, len(block), block
