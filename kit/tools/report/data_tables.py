"""Tables for people: about the data sets of a run (what became of their rows, what of the rows is not used), and as
text for a terminal.
"""

from typing import Any

import numpy as np

from kit.data.samples.samples import Samples
from kit.visible import one_line


def datasets_table(train: Samples, held_out: Samples | None) -> list[dict[str, Any]]:
    """The table of the data sets. ``held_out``: the samples of the same data sets that are for evaluation.

    If each row makes one sample, "samples" + "held out" + "left out" + "unused" = "rows". Unused are repeats that
    ``dedup`` leaves out, and samples beyond ``max_train_samples`` or ``max_eval_samples``. The length of a pair is that
    of its longer half.
    """
    rows = []
    num_all = sum(len(store.arrays["samples"]) for store in train.stores)
    are_all_used = len(train) + (len(held_out) if held_out else 0) == num_all
    for number, store in enumerate(train.stores):
        of_dataset = train.dataset_ids == number
        lengths, num_targets = train.lengths[of_dataset], train.num_targets[of_dataset]
        row_lengths = train.row_lengths[of_dataset]
        counts = store.report
        num_held_out = int((held_out.dataset_ids == number).sum()) if held_out else 0
        rows.append(
            {
                "data set": store.name,
                "rows": counts["num_rows"],
                "samples": len(lengths),
                **({"held out": num_held_out} if held_out else {}),
                **({} if are_all_used else {"unused": counts["num_samples"] - len(lengths) - num_held_out}),
                "left out": counts["num_dropped_long"] + counts["num_dropped_unsupervised"],
                "cut": counts["num_truncated"] + counts["num_split"],
                "blank lines": counts["num_blank_lines"],
                "skipped": counts["num_skipped"],
                "tokens": int(lengths.sum(dtype=np.int64)),
                "learned": f"{num_targets.sum() / lengths.sum():.1%}",
                "median length": int(np.median(row_lengths)),
                "longest": int(row_lengths.max()),
            }
        )
    return rows


def unused_table(train: Samples) -> list[dict[str, Any]]:
    """The table of what is not used of the rows."""
    return [
        {"data set": store.name, "not used": name, "share of rows": f"{share:.1%}"}
        for store in train.stores
        for name, share in store.unused.items()
    ]


def text_table(rows: list[dict[str, Any]], left: bool = False) -> list[str]:
    """Return the lines of a table of ``rows``, which all have the same keys, for a terminal.

    Args:
        left: the columns are aligned at the left.
    """
    values = [[f"{value:,}" if isinstance(value, int) else value for value in row.values()] for row in rows]
    cells = [[one_line(cell) for cell in row] for row in [list(rows[0]), *values]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = str.ljust if left else str.rjust
    lines = ("  ".join(align(cell, width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [f"  {line}".rstrip() for line in lines]
