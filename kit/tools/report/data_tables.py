"""What became of the rows of each data set."""

from typing import Any

import numpy as np

from kit.data.samples.samples import Samples


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
