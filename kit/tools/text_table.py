"""Tables for a terminal."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from kit.system.visible import one_line


def text_table(rows: Sequence[Mapping[str, Any]], numbers: Container[str] = ()) -> list[str]:
    """Return the lines of a table with a column for each key of the first row; empty without rows.

    Args:
        numbers: the columns that are aligned at the right.
    """
    if not rows:
        return []
    columns = []
    for name in rows[0]:
        cells = [one_line(f"{row[name]:,}" if isinstance(row[name], int) else row[name]) for row in rows]
        width = max(map(len, [name, *cells]))
        columns.append([cell.rjust(width) if name in numbers else cell.ljust(width) for cell in [name, *cells]])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
