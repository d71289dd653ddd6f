"""The items of one dataset of a stream, in an order that a seed and a cursor determine.

Its rows are read in windows: ``shuffle_buffer_size`` rows that follow one another. The samples of a window are
shuffled, and packed, among themselves. In each epoch the files come in another order.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np

from kit.config.settings.data import DataSettings
from kit.data.feed.order import PARTS, WINDOW, packed, permutation
from kit.data.read.sources import FIX, shown
from kit.data.samples.bad_rows import LOSSES, BadRow, check_share, num_distinct, problems_of
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder, Piece
from kit.data.samples.samples import Store
from kit.system.errors import TrainingError, raise_if

NUM_CHECKED = 1000  # rows that are read before the fraction of bad rows is checked

COUNTS = ("skipped_rows", *LOSSES)  # of a stream, in the metrics

Cursor = tuple[int, int, int]  # epoch, window in the epoch, items taken of the window


@dataclass(frozen=True)
class Element:
    """An item: one sample, or the samples of a pack."""

    dataset_id: int
    store: Store  # which holds its samples
    members: np.ndarray  # int64, their indices in it
    cursor: Cursor  # after this item
    counts: Mapping[str, int]  # what happened to the rows read until then, see ``COUNTS``
    skipped: list[BadRow]  # rows of its window that were skipped, if it is the first item read of the window


class Windows:
    """Reads a dataset without end."""

    def __init__(self, dataset_id: int, dataset: Dataset, encoder: Encoder, settings: DataSettings, seed: int) -> None:
        """
        Args:
            dataset_id: its index among the datasets of the stream.
        """
        self._id = dataset_id
        self._dataset = dataset
        self._encoder = encoder
        self._settings = settings
        self._seed = seed
        self._counts: Counter[str] = Counter()  # of this start

    def items(self, cursor: Cursor) -> Iterator[Element]:
        """Yield the items after ``cursor``. Raises ``UserError`` for rows that cannot be used and must not be skipped.

        Raises ``TrainingError`` if a whole epoch has no item.
        """
        first_epoch, first_window, num_taken = cursor
        skipped: list[BadRow] = []
        last_epoch = first_epoch  # with an item
        for epoch, window, rows in self._read(first_epoch, first_window):
            piece = self._encoder.encode(self._dataset, rows)
            store = self._encoder.as_store(self._dataset, piece)
            skipped += self._check(piece)
            counts = {name: self._counts[name] for name in COUNTS}
            for number, item in enumerate(self._order(piece, epoch, window), start=1):
                last_epoch = epoch
                if number > num_taken:
                    yield Element(self._id, store, item, (epoch, window, number), counts, skipped)
                    skipped = []
            num_taken = 0
            if epoch > last_epoch + 1:
                raise TrainingError(f"{self._dataset.source.name}: an epoch without a sample that could be used")

    def _check(self, piece: Piece) -> list[BadRow]:
        """Count the rows of a window by outcome, and return those that are skipped."""
        # In addition to rows: problems of more than one row, such as the rest of a damaged file.
        bad = piece.bad + [
            BadRow(-1, i, problem.where, replace(problem, where=""), is_common=False)
            for i, problem in enumerate(piece.problems)
        ]
        name = self._dataset.source.name
        if self._settings.on_bad_row == "error":
            raise_if(shown(problems_of(bad), name, FIX))
        self._counts += piece.counts + Counter(skipped_rows=num_distinct(bad))
        num_bad, num_good = self._counts["skipped_rows"], self._counts["num_rows"]
        if num_good + num_bad >= NUM_CHECKED:
            check_share(name, bad, num_bad, num_good)
        return bad

    def _order(self, piece: Piece, epoch: int, window: int) -> Iterator[np.ndarray]:
        """Yield the items of a window in their order: the indices of the samples of each."""
        number = epoch << 40 | window
        order = permutation(len(piece), self._seed, WINDOW, number, self._id)
        if not self._settings.packing:
            yield from order[:, None]
            return
        packs = packed(
            order, piece.arrays["samples"]["length"], self._encoder.pack_length, self._seed, number, self._id
        )
        for start, end in pairwise(packs.starts):
            yield packs.members[start:end]

    def _read(self, epoch: int, window: int) -> Iterator[tuple[int, int, list[tuple[int, int, Any]]]]:
        """Yield (epoch, window, rows) without end, beginning with ``window`` of ``epoch``.

        Each row is (number of its part, its number in the part, content).
        """
        source, size = self._dataset.source, self._settings.shuffle_buffer_size
        while True:
            rows = self._rows(epoch, num_to_skip=window * size)
            while block := list(islice(rows, size)):
                yield epoch, window, block
                window += 1
            if not window:
                raise TrainingError(f"{source.name}: no rows")
            epoch, window = epoch + 1, 0

    def _rows(self, epoch: int, num_to_skip: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the rows of an epoch, without the first ``num_to_skip``: their blocks are not parsed."""
        source = self._dataset.source
        for number in permutation(len(source.parts), self._seed, PARTS, epoch, self._id).tolist():
            part = source.parts[number]
            for block in part.blocks(self._dataset.columns):
                if num_to_skip < block.num_rows:
                    for row_number, row in islice(part.rows(block), num_to_skip, None):
                        yield number, row_number, row
                num_to_skip = max(0, num_to_skip - block.num_rows)
