"""Slices of local data: ``train[:1000]``, ``train[10%:20%]``, with the meaning that they have in ``datasets``.

Promises: a slice counts rows, not blank lines; the rows keep their line numbers.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from kit.data.read.parts import Part
from kit.errors import Problem, UserError

SLICE = re.compile(r"\[[^\[\]]*\]$")


def split_of(spec: str) -> str:
    """The name of the split in ``train[:1000]``."""
    return SLICE.sub("", spec)


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
                made.append(replace(part, window=(start, stop), size=None))
            before += count
    except (ValueError, AssertionError, AttributeError) as error:
        reason = (str(error) or "no slice").splitlines()[0]
    if not made:
        expected = "a slice such as train[:1000], train[1000:], train[10%:20%]"
        raise UserError(Problem(f"{flag}_split", f"{spec!r} ({reason})", expected))
    return made
