"""Slices of local data: ``train[:1000]``, ``train[10%:20%]``, with the meaning that they have in ``datasets``.

A sample of large data is every n-th block.

Promises: a slice counts rows, not blank lines; the rows keep their line numbers; what follows the slice is not parsed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kit.data.read.parts import Block, Part
from kit.data.read.text import Row
from kit.errors import Problem, UserError

SLICE = re.compile(r"\[[^\[\]]*\]$")


def split_of(spec: str) -> str:
    """The name of the split in ``train[:1000]``."""
    return SLICE.sub("", spec)


@dataclass(frozen=True)
class _WrappedPart:
    """A part that reads some of the rows of another one. Subclasses say which, in ``blocks``."""

    part: Part

    @property
    def unit(self) -> str:
        """The unit of sizes, see ``Part``."""
        return self.part.unit

    @property
    def has_schema(self) -> bool:
        """Whether only the columns asked for are read, see ``Part``."""
        return self.part.has_schema

    @property
    def has_lines(self) -> bool:
        """Whether rows are numbered by line, see ``Part``."""
        return self.part.has_lines

    @property
    def name(self) -> str:
        """The name of the part."""
        return self.part.name

    @property
    def size(self) -> int | None:
        """Unknown: what is left out may have any share of the part's size."""
        return None

    def rows(self, block: Block) -> Iterator[Row]:
        """Parse a block, see ``Part``."""
        return self.part.rows(block)


@dataclass(frozen=True)
class Slice(_WrappedPart):
    """Some consecutive rows of a part; it is a part itself."""

    start: int  # rows of the part before the first one, blank lines not counted
    stop: int  # rows of the part up to the last one

    def blocks(self, columns: list[str] | None = None) -> Iterator[Block]:
        """Read the blocks that the slice touches; those at its borders are cut."""
        seen = 0
        for block in self.part.blocks(columns):
            first = seen
            seen += _num_filled(block, self.has_schema)
            if first >= self.stop:
                return
            if seen <= self.start:
                continue
            if self.start <= first and seen <= self.stop:
                yield block
                continue
            rows = []
            for row in self.part.rows(block):
                if self.start <= first < self.stop:
                    rows.append(row)
                if row[1] is not None:
                    first += 1
            if rows:
                yield Block(rows[0][0], len(rows), block.size, rows)


@dataclass(frozen=True)
class Thinned(_WrappedPart):
    """Every n-th block of a part; it is a part itself."""

    first: int  # blocks before the first one
    every: int

    def blocks(self, columns: list[str] | None = None) -> Iterator[Block]:
        """Read the blocks, see ``Part``."""
        return islice(self.part.blocks(columns), self.first, None, self.every)


def _num_filled(block: Block, has_schema: bool) -> int:
    """The number of rows in a block without blank lines."""
    if isinstance(block.payload, list):
        return sum(row is not None for _, row in block.payload)
    if has_schema:
        return block.num_rows
    # As rows are parsed: a BOM, and the spaces of Unicode, are blank too.
    return sum(bool(line.decode("utf-8-sig", "replace").strip()) for line in block.payload.split(b"\n"))


def _num_rows(part: Part) -> int:
    if part.has_schema and part.size is not None:
        return part.size
    return sum(_num_filled(block, part.has_schema) for block in part.blocks())


def sliced(parts: Sequence[Part], spec: str, flag: str) -> list[Part]:
    """The parts of the rows that ``spec`` names, such as ``train[:1000]``; all rows are counted first.

    ``flag`` is the recipe's key, for messages. Raises ``UserError`` if it is no slice, or has no rows.
    """
    from datasets import ReadInstruction

    counts = [_num_rows(part) for part in parts]
    total = sum(counts)
    where = f"{flag}_split"
    expected = "a slice such as train[:1000], train[1000:], train[10%:20%]"
    try:
        (chosen,) = ReadInstruction.from_spec(spec).to_absolute({split_of(spec): total})
    except (ValueError, AssertionError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else "no slice"
        raise UserError(Problem(where, f"{spec!r} ({reason})", expected)) from None
    first = chosen.from_ or 0
    last = total if chosen.to is None else chosen.to
    made: list[Part] = []
    before = 0
    for part, count in zip(parts, counts, strict=True):
        start = max(first - before, 0)
        stop = min(last - before, count)
        if start < stop:
            made.append(Slice(part, start, stop))
        before += count
    if not made:
        raise UserError(Problem(where, f"{spec!r} of {total} rows has no row", expected))
    return made
