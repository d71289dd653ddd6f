"""How a file becomes rows: its blocks are read in one process, and parsed in any.

Promises:

- A row that cannot be used is a ``Problem`` with its line or row. Reading goes on behind it where that is possible.
- No file is taken for a shorter one: where it is cut short or damaged, its rows end with a ``Problem``.
- Memory stays flat.
- The same content gives the same blocks every time.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Protocol

from kit.data.read.archives import Reader, Stored, first_line, opened
from kit.data.read.text import MAX_LINE_BYTES, Row, array_rows, csv_rows, json_rows, long_line, skip_line
from kit.errors import Problem

BLOCK_BYTES = 1 << 18
BLOCK_ROWS = 1000
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a part, not yet parsed; small enough to send to another process."""

    first: int  # number of its first row or line
    num_rows: int  # rows or lines in it, blank ones included
    size: int  # its share of the part's size
    payload: Any  # bytes of whole lines, an Arrow stream as bytes, or a list of Row


class Part(Protocol):
    """A file or a shard: frozen data that can be sent to another process.

    ``name`` is as shown to users (``data/train.jsonl``). ``size`` is the sum of the blocks' sizes in ``unit``, None
    where only reading tells.
    """

    unit: ClassVar[str]  # "B" or " rows"

    @property
    def has_lines(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int | None: ...

    def blocks(self, columns: list[str] | None = None) -> Iterator[Block]:
        """Read and decompress, little more. ``columns``: those needed, None all of them; lines come whole anyway."""

    def rows(self, block: Block) -> Iterator[Row]:
        """Parse a block of this part."""


def origin(part: Part, number: int) -> str:
    """Line or row ``number`` as a user can find it: ``train.jsonl:17``, ``train.parquet row 17``."""
    return f"{part.name}:{number}" if part.has_lines else f"{part.name} row {number}"


def to_the_end(blocks: Callable[..., Iterator[Block]]) -> Callable[..., Iterator[Block]]:
    """Let ``Part.blocks`` end with a ``Problem`` instead of an exception, whatever the libraries raise."""

    @functools.wraps(blocks)
    def told(self: Part, columns: list[str] | None = None) -> Iterator[Block]:
        number = 1
        try:
            for block in blocks(self, columns):
                number = block.first + block.num_rows
                yield block
        except Exception as error:
            yield _ending(self.name, number, f"damaged or unreadable ({first_line(error)})")

    return told


def _ending(name: str, number: int, found: str) -> Block:
    return Block(number, 1, 0, [(number, Problem(name, found))])


@dataclass(frozen=True)
class _TextFile:
    unit: ClassVar[str] = "B"
    name: str
    stored: Stored

    @property
    def has_lines(self) -> bool:
        return True

    @property
    def size(self) -> int:
        return self.stored.num_bytes

    @to_the_end
    def blocks(self, columns: list[str] | None = None) -> Iterator[Block]:
        num_bytes, last = 0, 0
        with opened(self.stored) as reader:
            for first, num_rows, payload in self._pieces(reader):
                num_bytes, before = reader.num_bytes_read, num_bytes
                last = payload[-1][0] if isinstance(payload, list) else first + num_rows - 1
                yield Block(first, num_rows, num_bytes - before, payload)
            if reader.damage:
                unit = "line" if self.has_lines else "row"
                yield _ending(self.name, last + 1, f"{reader.damage} after {unit} {last}")

    def _pieces(self, reader: Reader) -> Iterator[tuple[int, int, Any]]:
        """``first``, ``num_rows`` and ``payload`` of blocks."""
        raise NotImplementedError

    def rows(self, block: Block) -> Iterator[Row]:
        if isinstance(block.payload, bytes):
            return json_rows(block.payload, block.first, self.name)
        return iter(block.payload)


@dataclass(frozen=True)
class JsonFile(_TextFile):
    """Lines of JSON objects, or one JSON array of them, which may share a line."""

    is_array: bool

    @property
    def has_lines(self) -> bool:
        return not self.is_array

    def _pieces(self, reader: Reader) -> Iterator[tuple[int, int, Any]]:
        if self.is_array:
            yield from _by_thousands(array_rows(reader, self.name))
            return
        first = 1
        while lines := reader.read(BLOCK_BYTES):
            num_whole = lines.rfind(b"\n") + 1  # bytes of whole lines; the last line may go on behind what was read
            rest = reader.readline(MAX_LINE_BYTES + 1 - len(lines) + num_whole) if num_whole < len(lines) else b""
            is_open = num_whole < len(lines) and not rest.endswith(b"\n")
            is_long = is_open and len(lines) - num_whole + len(rest) > MAX_LINE_BYTES
            if is_long:
                skip_line(reader)
            lines = lines[:num_whole] if is_long or (is_open and reader.damage) else lines + rest
            if lines:
                num_lines = lines.count(b"\n") + (not lines.endswith(b"\n"))
                yield first, num_lines, lines
                first += num_lines
            if is_long:
                yield first, 1, [(first, long_line(f"{self.name}:{first}"))]
                first += 1


def begins_array(stored: Stored) -> bool:
    """Whether it is a JSON array, whatever its suffix says; not, where it cannot be read."""
    try:
        with opened(stored) as reader:
            return reader.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except Exception:  # which reading it will tell
        return False


@dataclass(frozen=True)
class CellFile(_TextFile):
    """CSV or TSV. The first row names the columns."""

    def _pieces(self, reader: Reader) -> Iterator[tuple[int, int, Any]]:
        return _by_thousands(csv_rows(reader, self.name, DELIMITERS[self.stored.suffix]))


def _by_thousands(rows: Iterator[Row]) -> Iterator[tuple[int, int, list[Row]]]:
    while some := list(islice(rows, BLOCK_ROWS)):
        yield some[0][0], len(some), some
