"""The lanes of a stream: read the rows of a stream in windows, and distribute them over lanes.

``kit.data.feed.stream`` takes item i of each global batch from lane i. The files of a source are divided into S
sub-streams: sub-stream k reads files k, k + S, ... and serves lanes k, k + S, ... With enough files of similar size, no
file is read by two ranks. Row j of a sub-stream goes to its lane (j + epoch) mod n, where n is the number of its lanes.
A rank reads all rows of its sub-streams, but tokenises only those of its own lanes.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from kit.config.recipe import Recipe
from kit.data.feed.order import LANE, PACKS, PARTS, permutation
from kit.data.feed.packing import pack
from kit.data.read.sources import shown
from kit.data.samples.bad_rows import BadRow, BadRows
from kit.data.samples.rows import Encoder, Opened
from kit.errors import Problem, TrainingError, UserError

NUM_JUDGED = 1000  # after so many rows it is judged whether too many of them cannot be used
UNEVEN = 1.1  # largest accepted ratio of the sizes of two sub-streams

# What may happen to a row: the key in the metrics, and the words for the user.
COUNTS = {
    "skipped_rows": "rows could not be used, and were skipped",
    "num_truncated": "samples cut at max_length",
    "num_split": "samples cut in pieces",
    "num_dropped_long": "samples left out: longer than max_length",
    "num_dropped_unsupervised": "samples dropped: nothing supervised left",
}


@dataclass(frozen=True)
class StreamedSource:
    """A data set of a stream, and what makes samples of its rows."""

    number: int  # among the data sets of the stream
    opened: Opened
    encoder: Encoder
    vocab_size: int  # rows of the model's embedding


@dataclass(frozen=True)
class Element:
    """An item of a lane: one sample, or the samples of a pack."""

    samples: list[tuple[np.ndarray, np.ndarray]]  # ids and weights
    origins: list[str]  # ``file:line`` of each sample
    cursor: tuple[int, int, int]  # of the lane after this item: epoch, window, items taken of the window


def num_sub_streams(sizes: Sequence[int | None], num_lanes: int) -> int:
    """Return the largest number of sub-streams that divides the lanes evenly and has sub-streams of similar size.

    Args:
        sizes: of the files of a source; None: unknown.
    """
    for num in range(min(len(sizes), num_lanes), 1, -1):
        shares = [sum(size or 0 for size in sizes[i::num]) for i in range(num)]
        if num_lanes % num == 0 and (None in sizes or max(shares) <= UNEVEN * min(shares)):
            return num
    return 1


class SubStream:
    """A part of the files of a source, read for the lanes of this rank that it serves."""

    def __init__(
        self, source: StreamedSource, recipe: Recipe, lanes: range, starts: dict[int, tuple[int, ...]]
    ) -> None:
        """
        Args:
            lanes: the lanes of all ranks that this sub-stream serves: k, k + S, ... It reads files k, k + S, ...
            starts: the cursor of each of this rank's lanes: epoch, window, items taken of the window.
        """
        self._encoder, self._vocab_size = source.encoder, source.vocab_size
        self._opened, self._recipe, self._source = source.opened, recipe, source.number
        self._parts = list(range(lanes.start, len(self._opened.source.parts), lanes.step))
        self._lanes, self._starts, self.lanes = list(lanes), starts, list(starts)
        # A multiple of the number of lanes, so that each lane gets the same number of rows of a window.
        self._window_size = -(-recipe.shuffle_buffer_size // len(self._lanes)) * len(self._lanes)
        self._queues: dict[int, deque[Element]] = {lane: deque() for lane in self.lanes}
        epoch, window, _ = min(self._starts.values())
        self._windows = self._read_windows(epoch, window)
        self._counted = max(self._starts.values())  # earlier starts have counted the rows up to this window
        self._last_found = epoch  # the last epoch in which this rank got a sample
        self.counts: Counter[str] = Counter()  # what happened to the rows read, see ``COUNTS``
        self.first_skipped = ""  # why the first skipped row was skipped
        self._bad = BadRows(keeps_all=False)  # of this start
        self._num_read = 0  # good rows of this start
        self._skipped: deque[BadRow] = deque()  # not yet taken by ``skipped``

    def take(self, lane: int) -> Element:
        """Return the next item of ``lane``, one of this rank's lanes."""
        while not self._queues[lane]:
            self._fill()
        return self._queues[lane].popleft()

    def _fill(self) -> None:
        """Read the next window, and add its items to the queues of this rank's lanes."""
        epoch, window, rows = next(self._windows)
        num_lanes = len(self._lanes)
        lanes = [self._lanes[(j + epoch) % num_lanes] for j in range(len(rows))]
        own = [j for j, lane in enumerate(lanes) if lane in self._queues]
        piece = self._encoder.encode(self._opened, [rows[j] for j in own])
        starts = piece.samples["start"]
        largest = np.maximum.reduceat(piece.input_ids, starts) if len(starts) else np.empty(0)
        too_large = largest >= self._vocab_size
        bad = piece.bad + self._too_large(piece.samples[too_large])
        bad += [BadRow(-1, i, each.where, replace(each, where=""), False) for i, each in enumerate(piece.problems)]
        num_skipped = len({row[:2] for row in bad})
        if (epoch, window, 1) > self._counted:
            self.counts += piece.counts + Counter(skipped_rows=num_skipped)
            self._skipped += bad
        if num_skipped and not self.first_skipped:
            self.first_skipped = str(bad[0].told)
        self._judge(bad, piece.counts["num_rows"])
        members: dict[int, list[int]] = {lane: [] for lane in self.lanes}
        origins = list(zip(piece.samples["part"].tolist(), piece.samples["number"].tolist(), strict=True))
        for i, index in enumerate(piece.rows):
            if not too_large[i]:
                members[lanes[own[index]]].append(i)
        for lane, indices in members.items():
            for taken, item in enumerate(self._items(piece.samples["length"], indices, epoch, window, lane), start=1):
                if (epoch, window, taken) > self._starts[lane]:
                    samples = [piece[i] for i in item]
                    named = [self._opened.source.origin(*origins[i]) for i in item]
                    self._queues[lane].append(Element(samples, named, (epoch, window, taken)))
        if origins:
            self._last_found = epoch
        elif (
            epoch > self._last_found + num_lanes
        ):  # with very few rows, a lane may get one only every ``num_lanes`` epochs
            raise TrainingError(f"{self._opened.source.name}: {num_lanes} epochs without a sample that could be used")

    def skipped(self) -> list[BadRow]:
        """Return the rows skipped since the last call, without those of earlier starts of the run."""
        return [self._skipped.popleft() for _ in range(len(self._skipped))]

    def _too_large(self, samples: np.ndarray) -> list[BadRow]:
        """The rows of samples with token ids that the model has no embedding for."""
        problem = Problem("", "a token id that the model has no embedding for")
        rows = sorted({(int(sample["part"]), int(sample["number"])) for sample in samples})
        return [BadRow(*row, self._opened.source.origin(*row), problem, is_common=True) for row in rows]

    def _judge(self, bad: list[BadRow], num_rows: int) -> None:
        """Raise ``UserError`` for rows that must not be skipped, or if there are too many of them."""
        name = self._opened.source.name
        if self._recipe.on_bad_row == "error" and bad:
            told = shown(BadRows(bad).problems(), name)
            told[-1] = replace(told[-1], fix="mend it, or go on without it: the same command with --on_bad_row skip")
            raise UserError(*told)
        self._bad.add(bad)
        self._num_read += num_rows
        if self._num_read + self._bad.num_rows >= NUM_JUDGED:
            self._bad.raise_if_too_many(name, self._num_read)

    def _items(
        self, lengths: np.ndarray, indices: list[int], epoch: int, window: int, lane: int
    ) -> Iterator[list[int]]:
        seed, number, stream = self._recipe.seed, epoch << 40 | window, self._source << 32 | lane
        order = np.array(indices, np.int64)[permutation(len(indices), seed, LANE, number, stream)]
        if not self._recipe.packing:
            yield from ([int(i)] for i in order)
            return
        packs = pack(lengths[order], self._recipe.max_length)
        for p in permutation(len(packs), seed, PACKS, number, stream):
            yield order[packs.members[packs.starts[p] : packs.starts[p + 1]]].tolist()

    def _read_windows(self, epoch: int, window: int) -> Iterator[tuple[int, int, list[tuple[int, int, Any]]]]:
        """Yield (epoch, window, rows) without end, beginning with ``window`` of ``epoch``.

        Each row is (number of its part, its number in the part, content).
        """
        columns = self._opened.columns
        while True:
            order = permutation(len(self._parts), self._recipe.seed, PARTS, epoch, self._source)
            skipped = window * self._window_size  # rows to skip before the window begins
            rows: list[tuple[int, int, Any]] = []
            for number in (self._parts[i] for i in order):
                part = self._opened.source.parts[number]
                for block in part.blocks(columns):
                    if skipped >= block.num_rows:
                        skipped -= block.num_rows
                        continue
                    for row_number, row in islice(part.rows(block), skipped, None):
                        rows.append((number, row_number, row))
                        if len(rows) == self._window_size:
                            yield epoch, window, rows
                            rows, window = [], window + 1
                    skipped = 0
            if rows or not window:
                yield epoch, window, rows
            epoch, window = epoch + 1, 0
