"""Tables for people: about the data sets of a run (what became of their rows), and as text for a terminal."""

from typing import Any

import numpy as np

from kit.data.samples.samples import Samples
from kit.visible import one_line


def datasets_table(train: Samples) -> list[dict[str, Any]]:
    """Return the table of the data sets. The length of a pair is that of its longer half."""
    rows = []
    for number, store in enumerate(train.stores):
        own, counts = train.dataset_ids == number, store.report
        lengths = train.row_lengths[own]
        rows.append(
            {
                "data set": store.name,
                "rows": counts["num_rows"],
                "samples": len(lengths),
                "left out": counts["num_dropped_long"] + counts["num_dropped_unsupervised"],
                "cut": counts["num_truncated"] + counts["num_split"],
                "skipped": counts["num_skipped"],
                "tokens": int(train.lengths[own].sum(dtype=np.int64)),
                "learned": f"{train.num_targets[own].sum() / train.lengths[own].sum():.1%}",
                "median length": int(np.median(lengths)),
                "longest": int(lengths.max()),
            }
        )
    return rows


def text_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table of ``rows``, which all have the same keys, for a terminal."""
    if not rows:
        return []
    values = [[f"{value:,}" if isinstance(value, int) else value for value in row.values()] for row in rows]
    cells = [[one_line(cell) for cell in row] for row in [list(rows[0]), *values]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [f"  {line}".rstrip() for line in lines]
