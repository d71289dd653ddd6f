"""Slices of local data: ``train[:1000]``, ``train[10%:20%]``, with the meaning that they have in ``datasets``.

A sample of large data is every n-th block.

Promises: a slice counts rows, not blank lines; the rows keep their line numbers.
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
        """Read the rows of the slice, in the blocks of the part."""
        seen = 0
        for block in self.part.blocks(columns):
            if seen >= self.stop:
                return
            filled = [row for row in self.part.rows(block) if row[1] is not None]
            rows = filled[max(self.start - seen, 0) : self.stop - seen]
            seen += len(filled)
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


def _num_rows(part: Part) -> int:
    if part.has_schema and part.size is not None:
        return part.size
    return sum(row is not None for block in part.blocks() for _, row in part.rows(block))


def sliced(parts: Sequence[Part], spec: str, flag: str) -> list[Part]:
    """The parts of the rows that ``spec`` names, such as ``train[:1000]``; all rows are counted first.

    ``flag`` is the recipe's key, for messages. Raises ``UserError`` if it is no slice, or has no rows.
    """
    from datasets import ReadInstruction

    counts = [_num_rows(part) for part in parts]
    total = sum(counts)
    made: list[Part] = []
    reason = f"of {total} rows it has none"
    try:
        (chosen,) = ReadInstruction.from_spec(spec).to_absolute({split_of(spec): total})
        before = 0
        for part, count in zip(parts, counts, strict=True):
            start = max((chosen.from_ or 0) - before, 0)
            stop = min((total if chosen.to is None else chosen.to) - before, count)
            if start < stop:
                made.append(Slice(part, start, stop))
            before += count
    except (ValueError, AssertionError, AttributeError) as error:
        reason = (str(error) or "no slice").splitlines()[0]
    if not made:
        expected = "a slice such as train[:1000], train[1000:], train[10%:20%]"
        raise UserError(Problem(f"{flag}_split", f"{spec!r} ({reason})", expected))
    return made
