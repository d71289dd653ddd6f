"""Tables about the data sets of a run, for people: what became of their rows, and what of the rows is not used."""

from typing import Any

import numpy as np

from kit.data.samples.samples import Samples


def sources_table(train: Samples, is_split: bool) -> list[dict[str, Any]]:
    """The table of the sources.

    If each row makes one sample, "samples" + "held out" + "left out" = "rows".
    """
    rows = []
    for number, store in enumerate(train.stores):
        of_source = train.sources == number
        lengths, num_targets = train.lengths[of_source], train.num_targets[of_source]
        counts = store.report
        rows.append(
            {
                "data set": store.name,
                "rows": counts["num_rows"],
                "samples": len(lengths),
                **({"held out": counts["num_samples"] - len(lengths)} if is_split else {}),
                "left out": counts["num_dropped_long"] + counts["num_dropped_unsupervised"],
                "cut": counts["num_truncated"] + counts["num_split"],
                "blank lines": counts["num_blank_lines"],
                "skipped": counts["num_skipped"],
                "tokens": int(lengths.sum(dtype=np.int64)),
                "learned": f"{num_targets.sum() / lengths.sum():.1%}",
                "median length": int(np.median(lengths)),
                "longest": int(lengths.max()),
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
