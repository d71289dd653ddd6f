"""The lanes of a stream: read the rows of a stream in windows, and distribute them over lanes.

``kit.data.feed.stream`` takes item i of each global batch from lane i. The files of a data set are divided into S
sub-streams: sub-stream k reads files k, k + S, ... and serves lanes k, k + S, ... With enough files of similar size, no
file is read by two ranks. Row j of a sub-stream goes to its lane (j + epoch) mod n, where n is the number of its lanes.
A rank reads all rows of its sub-streams, but tokenises only those of its own lanes.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from kit.config.settings.data import DataSettings
from kit.data.feed.order import LANE, PACKS, PARTS, permutation
from kit.data.feed.packing import pack
from kit.data.read.sources import shown
from kit.data.samples.bad_rows import BadRow, BadRows, num_distinct
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder, Piece
from kit.errors import TrainingError, UserError

NUM_JUDGED = 1000  # rows that are read before it is judged whether too many of them cannot be used
UNEVEN = 1.1  # largest accepted ratio of the sizes of two sub-streams

# What may happen to a row: the key in the metrics, and the words for the user.
COUNTS = {
    "skipped_rows": "rows could not be used, and were skipped",
    "num_truncated": "samples cut at max_length",
    "num_split": "samples cut in pieces",
    "num_dropped_long": "samples left out: longer than max_length",
    "num_dropped_unsupervised": "samples dropped: nothing supervised left",
}


Cursor = tuple[int, int, int]  # of a lane: epoch, window in the epoch, items taken of the window


@dataclass(frozen=True)
class StreamedDataset:
    """A data set of a stream, and what decides which samples its rows become, and in which order."""

    dataset_id: int  # its index among the data sets of the stream
    dataset: Dataset
    encoder: Encoder
    settings: DataSettings
    seed: int


@dataclass(frozen=True)
class Element:
    """An item of a lane: one sample, or the samples of a pack."""

    samples: list[list[tuple[np.ndarray, np.ndarray]]]  # ids and weights of each sequence of each sample
    origins: list[str]  # ``file:line`` of each sample
    cursor: Cursor  # of the lane after this item


def num_sub_streams(sizes: Sequence[int | None], num_lanes: int) -> int:
    """Return the largest number of sub-streams that divides the lanes evenly and has sub-streams of similar size.

    Args:
        sizes: of the files of a data set; None: unknown.
    """
    known = [size for size in sizes if size is not None]
    for num in range(min(len(sizes), num_lanes), 1, -1):
        if num_lanes % num:
            continue
        if len(known) < len(sizes):
            return num
        shares = [sum(known[i::num]) for i in range(num)]
        if max(shares) <= UNEVEN * min(shares):
            return num
    return 1


class SubStream:
    """A part of the files of a data set, read for the lanes of this rank that it serves."""

    def __init__(
        self,
        streamed: StreamedDataset,
        lanes: range,
        starts: Mapping[int, Cursor],
    ) -> None:
        """
        Args:
            lanes: the lanes of all ranks that this sub-stream serves: k, k + S, ... It reads files k, k + S, ...
            starts: the cursor of each of this rank's lanes.
        """
        self._streamed = streamed
        self._source = streamed.dataset.source
        self._settings = streamed.settings
        self._files = list(range(lanes.start, len(self._source.parts), lanes.step))
        self._all_lanes = list(lanes)
        self.lanes = list(starts)  # those of this rank
        self._starts = starts
        # A multiple of the number of lanes, so that each lane gets the same number of rows of a window.
        rows_per_lane = math.ceil(self._settings.shuffle_buffer_size / len(lanes))
        self._window_size = rows_per_lane * len(lanes)
        self._queues: dict[int, deque[Element]] = {lane: deque() for lane in self.lanes}
        epoch, window, _ = min(starts.values())
        self._windows = self._read_windows(epoch, window)
        self._last_epoch_with_samples = epoch  # for this rank
        self.counts: Counter[str] = Counter()  # what happened to the rows read, see ``COUNTS``
        self.first_skipped = ""  # why the first skipped row was skipped
        self._bad = BadRows(keeps_all=False)  # of this start
        self._num_good = 0  # rows of this start that can be used
        self._skipped: deque[BadRow] = deque()  # not yet taken by ``skipped``

    def take(self, lane: int) -> Element:
        """Return the next item of ``lane``, one of this rank's lanes."""
        while not self._queues[lane]:
            self._read_next_window()
        return self._queues[lane].popleft()

    def skipped(self) -> list[BadRow]:
        """Return the rows skipped since the last call."""
        # Another thread may add rows meanwhile.
        return [self._skipped.popleft() for _ in range(len(self._skipped))]

    def _read_next_window(self) -> None:
        """Read the next window, and add its items to the queues of this rank's lanes."""
        epoch, window, rows = next(self._windows)
        lanes = [self._all_lanes[(j + epoch) % len(self._all_lanes)] for j in range(len(rows))]
        own = [j for j, lane in enumerate(lanes) if lane in self._queues]
        piece = self._streamed.encoder.encode(self._streamed.dataset, [rows[j] for j in own])
        # Besides rows, what is wrong with more than one, such as the rest of a damaged file.
        bad = piece.bad + [
            BadRow(-1, i, problem.where, replace(problem, where=""), is_common=False)
            for i, problem in enumerate(piece.problems)
        ]
        num_skipped = num_distinct(bad)
        self.counts += piece.counts + Counter(skipped_rows=num_skipped)
        self._skipped.extend(bad)
        if num_skipped and not self.first_skipped:
            self.first_skipped = str(bad[0].problem_with_origin)
        self._raise_if_bad(bad, piece.counts["num_rows"])
        samples_of_lane: dict[int, list[int]] = {lane: [] for lane in self.lanes}
        for i, index in enumerate(piece.rows):
            samples_of_lane[lanes[own[index]]].append(i)
        for lane, indices in samples_of_lane.items():
            items = self._items(piece.samples["length"], indices, epoch, window, lane)
            for num_taken, item in enumerate(items, start=1):
                cursor = (epoch, window, num_taken)
                if cursor > self._starts[lane]:
                    self._queues[lane].append(self._element(piece, item, cursor))
        if len(piece):
            self._last_epoch_with_samples = epoch
        # With very few rows, a lane may get one only once in as many epochs as there are lanes.
        elif epoch > self._last_epoch_with_samples + len(self._all_lanes):
            found = f"{len(self._all_lanes)} epochs without a sample that could be used"
            raise TrainingError(f"{self._source.name}: {found}")

    def _element(self, piece: Piece, item: list[int], cursor: Cursor) -> Element:
        """Make an element of the samples ``item`` of a piece."""
        parts, numbers = piece.samples["part"], piece.samples["number"]
        origins = [self._source.origin(int(parts[i]), int(numbers[i])) for i in item]
        return Element([piece.sequences(i) for i in item], origins, cursor)

    def _raise_if_bad(self, bad: list[BadRow], num_good: int) -> None:
        """Raise ``UserError`` for rows that must not be skipped, or if there are too many of them.

        Args:
            num_good: rows read together with ``bad`` that can be used.
        """
        if self._settings.on_bad_row == "error" and bad:
            problems = shown(BadRows(bad).problems(), self._source.name, "")
            fix = "fix it, or go on without it: the same command with --on_bad_row skip"
            problems[-1] = replace(problems[-1], fix=fix)
            raise UserError(*problems)
        self._bad.add(bad)
        self._num_good += num_good
        if self._num_good + self._bad.num_rows >= NUM_JUDGED:
            self._bad.raise_if_too_many(self._source.name, self._num_good)

    def _items(
        self, lengths: np.ndarray, indices: list[int], epoch: int, window: int, lane: int
    ) -> Iterator[list[int]]:
        """Yield the items of a lane in a window, in their order: the indices of the samples of each.

        Args:
            lengths: [N], tokens of each sample of the window.
            indices: of the lane's samples.
        """
        seed = self._streamed.seed
        number = epoch << 40 | window
        stream = self._streamed.dataset_id << 32 | lane
        order = np.array(indices, np.int64)[permutation(len(indices), seed, LANE, number, stream)]
        if not self._settings.packing:
            yield from ([int(i)] for i in order)
            return
        packs = pack(lengths[order], self._streamed.encoder.pack_length)
        for p in permutation(len(packs), seed, PACKS, number, stream):
            yield order[packs.members[packs.starts[p] : packs.starts[p + 1]]].tolist()

    def _read_windows(self, epoch: int, window: int) -> Iterator[tuple[int, int, list[tuple[int, int, Any]]]]:
        """Yield (epoch, window, rows) without end, beginning with ``window`` of ``epoch``.

        Each row is (number of its part, its number in the part, content).
        """
        columns = self._streamed.dataset.columns
        while True:
            order = permutation(len(self._files), self._streamed.seed, PARTS, epoch, self._streamed.dataset_id)
            num_to_skip = window * self._window_size  # rows before the window begins
            rows: list[tuple[int, int, Any]] = []
            for i in order:
                part_number = self._files[i]
                part = self._source.parts[part_number]
                for block in part.blocks(columns):
                    if num_to_skip >= block.num_rows:
                        num_to_skip -= block.num_rows
                        continue
                    for row_number, row in islice(part.rows(block), num_to_skip, None):
                        rows.append((part_number, row_number, row))
                        if len(rows) == self._window_size:
                            yield epoch, window, rows
                            rows = []
                            window += 1
                    num_to_skip = 0
            if rows or window == 0:
                yield epoch, window, rows
            epoch += 1
            window = 0
