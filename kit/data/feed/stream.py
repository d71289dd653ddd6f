"""Training data that is read while training: for sets that never fit on a disk.

Promises:

- The same samples in the same global batches on every topology. A stream is cut into as many lanes as a global batch
  has items; item i of a step comes from lane i, and a rank reads for its own lanes only.
- Exact resume: a checkpoint keeps one cursor for each lane and source; nothing comes twice or is left out, nor is
  counted twice (on another number of ranks, which read other rows ahead, counts may be off by a window's).
- Rows are shuffled within windows of ``shuffle_buffer_size``, and files from epoch to epoch.
- The first rows are checked before anything is loaded; later a row that cannot be used is skipped and counted.

Of S sub-streams each reads every S-th file and has every S-th lane, so that with files enough, and of about one size,
no file is read by two ranks. Row j of a sub-stream belongs to its lane (j + epoch) mod n: rows are counted as they are
read, and only a rank's own are tokenised.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from kit.cache import digest
from kit.config.recipe import Recipe
from kit.data.feed.batches import Collator, Item, MicroBatch
from kit.data.feed.feed import Ahead, GlobalBatch
from kit.data.feed.order import LANE, MIX, PACKS, PARTS, permutation, uniform
from kit.data.feed.packing import pack
from kit.data.feed.ranks import Ranks
from kit.data.read.sources import shown
from kit.data.samples.rows import Encoder, Opened
from kit.data.samples.samples import Samples
from kit.errors import Problem, TrainingError, UserError, raise_if

UNEVEN = 1.1  # ratio of what two sub-streams have to read that is still called even
# What became of the rows read, as in metrics and as told.
COUNTS = {
    "skipped_rows": "rows could not be used, and were skipped",
    "num_truncated": "samples cut at max_length",
    "num_split": "samples cut in pieces",
    "num_dropped_long": "samples left out: longer than max_length",
    "num_dropped_unsupervised": "samples dropped: nothing supervised left",
}
# Of a lane: epoch, window within it, items taken of the window.
Cursors = np.ndarray  # int64 [num_sources, lanes, 3]


@dataclass(frozen=True)
class _Element:
    """An item of a lane: a sample, or the samples of a pack, and where the lane stands after it."""

    samples: list[tuple[np.ndarray, np.ndarray]]  # ids and weights
    origins: list[str]
    cursor: tuple[int, int, int]


@dataclass(frozen=True)
class Stream:
    """What ``open_data`` gives for ``streaming``: like ``kit.data.open.Data``, with samples still to be read."""

    opened: list[Opened]
    encoder: Encoder
    vocab_size: int
    evaluation: Samples | None
    chat_template: str | None
    notes: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        sources = [(each.source.digest, sorted(each.fields.items()), each.entry.weight) for each in self.opened]
        return digest(sources, *self.encoder.key())

    @property
    def names(self) -> list[str]:
        return [each.entry.name for each in self.opened]

    def total_steps(self, recipe: Recipe) -> int:
        assert recipe.max_steps is not None
        return recipe.max_steps

    def open_feed(self, recipe: Recipe, ranks: Ranks, pad_token_id: int, state: dict[str, Any]) -> "StreamFeed":
        return StreamFeed(self, recipe, ranks, pad_token_id, state)

    def describe(self) -> dict[str, Any]:
        evaluation = self.evaluation and {"fingerprint": self.evaluation.fingerprint, **self.evaluation.report}
        train = {"num_files": sum(len(each.source.parts) for each in self.opened)}
        sources = [{"name": name} for name in self.names]
        return {"fingerprint": self.fingerprint, "train": train, "evaluation": evaluation, "sources": sources}


def check_beginning(opened: Opened, encoder: Encoder) -> tuple[int, list[str]]:
    """The largest token id of the first block, and remarks. Raises ``UserError`` where rows of it cannot be used."""
    source = opened.source
    block = next(iter(source.parts[0].blocks(list(opened.fields.values()))), None)
    piece = encoder.encode_block(opened, 0, block) if block else None
    if piece is None or not len(piece.samples) + len(piece.problems) + len(piece.refusals):
        raise UserError(Problem(source.name, "no row to learn from at its beginning", "at least one"))
    raise_if(shown([*piece.problems, *piece.refusals], source.name))
    return int(piece.input_ids.max()), [f"{source.name}: {text}" for text in piece.remarks]


class StreamFeed:
    """Global batches of a stream."""

    def __init__(self, stream: Stream, recipe: Recipe, ranks: Ranks, pad_token_id: int, state: dict[str, Any]) -> None:
        self._recipe, self._ranks = recipe, ranks
        self._collator = Collator(recipe.per_device_train_batch_size, pad_token_id, recipe.packing)
        num_lanes = recipe.global_batch_size
        weights = np.array([1.0 if each.entry.weight is None else each.entry.weight for each in stream.opened])
        self._shares = np.cumsum(weights / weights.sum())
        self._own = range(ranks.index, num_lanes, ranks.count)
        self._cursors = np.zeros((len(weights), num_lanes, 3), np.int64)
        self._before = np.zeros(len(COUNTS), np.int64)  # of the starts that this one continues
        if state:
            try:
                cursors, before = (np.array(state[name], np.int64) for name in ("cursors", "counts"))
                fits = (
                    cursors.shape == self._cursors.shape and before.shape == self._before.shape and cursors.min() >= 0
                )
            except (KeyError, ValueError, TypeError, OverflowError):
                fits = False
            if not fits:
                raise UserError(Problem("resume_from_checkpoint", "its state is no place in this stream"))
            self._cursors, self._before = cursors, before
        self._readers: list[dict[int, _SubStream]] = []  # of each source, by lane
        for number, each in enumerate(stream.opened):
            num_streams = _num_streams([part.size for part in each.source.parts], num_lanes)
            readers = [
                _SubStream(stream, each, recipe, number, i, num_streams, self._own, self._cursors[number])
                for i in {lane % num_streams for lane in self._own}
            ]
            self._readers.append({lane: reader for reader in readers for lane in reader.lanes})
        self._all_readers = [reader for readers in self._readers for reader in set(readers.values())]
        self._counts: dict[str, int] = dict(zip(COUNTS, self._before.tolist(), strict=True))
        self._ahead = Ahead(self._read, stream.total_steps(recipe))

    def take(self, step: int) -> GlobalBatch:
        """The global batch of ``step``, from 0; called by all ranks, for each step in turn."""
        elements, micro_batches, read = self._ahead.take(step)
        counts = np.zeros((3, len(self._shares)))
        for source, lane, element in elements:
            self._cursors[source, lane] = element.cursor
            for ids, sample_weights in element.samples:
                counts[:, source] += sample_weights[1:].sum(), (sample_weights[1:] > 0).sum(), len(ids)
        epochs = self._cursors[:, list(self._own), 0].sum()
        summed = self._ranks.sum(np.concatenate([counts.reshape(-1), read, [epochs]]))
        counts, totals = summed[: counts.size].reshape(counts.shape), summed[counts.size : -1].astype(int)
        self._counts = dict(zip(COUNTS, (self._before + totals).tolist(), strict=True))
        return GlobalBatch(
            micro_batches,
            target_weights=counts[0],
            num_targets=counts[1].astype(np.int64),
            num_tokens=counts[2].astype(np.int64),
            epoch=float(summed[-1]) / self._cursors[:, :, 0].size,
            origins=[origin for _, _, element in elements for origin in element.origins],
            counts=self._counts,
        )

    def state(self) -> dict[str, Any]:
        """Where every lane stands after the last step taken; called by all ranks."""
        own = np.zeros_like(self._cursors)
        own[:, list(self._own)] = self._cursors[:, list(self._own)]
        return {"cursors": self._ranks.sum(own).astype(np.int64).tolist(), "counts": [*self._counts.values()]}

    def notes(self) -> list[str]:
        return [f"streaming: rows shuffled within {self._recipe.shuffle_buffer_size}"]

    def closing_notes(self) -> list[str]:
        """What became of the rows read since the start, over all ranks; a bad one of this rank."""
        lines = [f"stream: {count} {COUNTS[name]}" for name, count in self._counts.items() if count]
        first = next((reader.first_skipped for reader in self._all_readers if reader.first_skipped), "")
        return lines + ([f"a skipped row: {first}"] if first else [])

    def _read(self, step: int) -> tuple[list[tuple[int, int, _Element]], list[MicroBatch], list[int]]:
        """Source, lane and item for each of this rank's lanes; these as tensors; what became of the rows read."""
        draws = uniform(self._recipe.global_batch_size, self._recipe.seed, MIX, step)
        sources = np.searchsorted(self._shares, draws, side="right").clip(max=len(self._shares) - 1)
        elements = [(int(sources[lane]), lane, self._readers[sources[lane]][lane].take(lane)) for lane in self._own]
        rows = _Rows(elements)
        shares = self._collator.deal(rows.lengths, rows.items, num_ranks=1)
        micro_batches = [self._collator.collate(rows, share) for (share,) in shares]
        return elements, micro_batches, [sum(reader.counts[name] for reader in self._all_readers) for name in COUNTS]


def _num_streams(sizes: Sequence[int | None], num_lanes: int) -> int:
    """As many sub-streams as the lanes can be divided into, with about equally much to read in each."""
    for num in range(min(len(sizes), num_lanes), 1, -1):
        shares = [sum(size or 0 for size in sizes[i::num]) for i in range(num)]
        if num_lanes % num == 0 and (None in sizes or max(shares) <= UNEVEN * min(shares)):
            return num
    return 1


class _Rows:
    """Samples of one step in the form ``collate`` takes."""

    def __init__(self, elements: Sequence[tuple[int, int, _Element]]) -> None:
        sizes = [len(element.samples) for _, _, element in elements]
        self._samples = [sample for _, _, element in elements for sample in element.samples]
        self.lengths = np.array([len(ids) for ids, _ in self._samples])
        self.sources = np.repeat([source for source, _, _ in elements], sizes)
        self.items: list[Item] = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self._samples[i]


class _SubStream:
    """Every S-th file of a source, for this rank's share of its lanes."""

    def __init__(
        self,
        stream: Stream,
        opened: Opened,
        recipe: Recipe,
        source: int,
        number: int,
        num_streams: int,
        own: range,
        cursors: np.ndarray,
    ) -> None:
        self._stream, self._opened, self._recipe, self._source = stream, opened, recipe, source
        self._parts = list(range(number, len(opened.source.parts), num_streams))
        self._lanes = list(range(number, recipe.global_batch_size, num_streams))  # of all ranks
        self.lanes = [lane for lane in self._lanes if lane in own]
        # As many rows for each lane, or some of them would fall behind further and further.
        self._window_size = -(-recipe.shuffle_buffer_size // len(self._lanes)) * len(self._lanes)
        self._queues: dict[int, deque[_Element]] = {lane: deque() for lane in self.lanes}
        self._starts = {lane: tuple(cursors[lane].tolist()) for lane in self.lanes}
        epoch, window, _ = min(self._starts.values())
        self._windows = self._read_windows(epoch, window)
        self._counted = max(self._starts.values())  # rows up to this one's window are in the counts of earlier starts
        self._last_found = epoch  # the last epoch that had a sample
        self.counts: Counter[str] = Counter()  # of the rows read
        self.first_skipped = ""

    def take(self, lane: int) -> _Element:
        while not self._queues[lane]:
            self._fill()
        return self._queues[lane].popleft()

    def _fill(self) -> None:
        """Read one window more, for all lanes of this rank."""
        epoch, window, rows = next(self._windows)
        num_lanes = len(self._lanes)
        lanes = [self._lanes[(j + epoch) % num_lanes] for j in range(len(rows))]
        own = [j for j, lane in enumerate(lanes) if lane in self._queues]
        piece = self._stream.encoder.encode(self._opened, [rows[j] for j in own])
        starts = piece.samples["start"]
        largest = np.maximum.reduceat(piece.input_ids, starts) if len(starts) else np.empty(0)
        too_large = largest >= self._stream.vocab_size
        num_skipped = len(piece.problems) + sum(count for _, count in piece.refusals.values()) + int(sum(too_large))
        if (epoch, window, 1) > self._counted:
            self.counts += piece.counts + Counter(skipped_rows=num_skipped)
        if num_skipped and not self.first_skipped:
            found = [str(problem) for problem in [*piece.problems, *piece.refusals]]
            self.first_skipped = (found or ["a token id that the model has no embedding for"])[0]
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
                    self._queues[lane].append(_Element(samples, named, (epoch, window, taken)))
        if origins:
            self._last_found = epoch
        elif epoch > self._last_found + num_lanes:  # of few rows, one of ours comes once in so many epochs
            raise TrainingError(f"{self._opened.source.name}: {num_lanes} epochs without a sample that could be used")

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
        """Epoch, window and its rows (part, number, content), from ``window`` of ``epoch`` on, without end."""
        columns = list(self._opened.fields.values())
        while True:
            order = permutation(len(self._parts), self._recipe.seed, PARTS, epoch, self._source)
            skipped = window * self._window_size  # rows to go before the window begins
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
