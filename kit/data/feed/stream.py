"""Streaming: training data that is read during training, for data sets that do not fit on a disk.

Promises:

- The same samples are in the same global batches on every topology. A stream has as many lanes as a global batch has
  items; item i of each step comes from lane i, and a rank reads only for its own lanes.
- Resume is exact: a checkpoint stores one cursor for each lane and source, so no sample is repeated or left out. Rows
  are not counted twice either, but after a resume with another number of ranks, which read ahead differently, counts
  may be wrong by the rows of one window.
- Rows are shuffled within windows of ``shuffle_buffer_size`` rows, and the order of files changes in each epoch.
- The first rows are checked before any weight is loaded. Later, a row that cannot be used is skipped, counted and
  listed in ``SKIPPED_FILE``; with ``on_bad_row`` error it ends the run. Too many such rows end it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.cache import digest
from kit.config.recipe import Recipe
from kit.data.chat.template import Jinja
from kit.data.feed.batches import Collator, Item, MicroBatch
from kit.data.feed.feed import Ahead, GlobalBatch
from kit.data.feed.lanes import COUNTS, Element, StreamedSource, SubStream, num_sub_streams
from kit.data.feed.order import MIX, uniform
from kit.data.feed.ranks import Ranks
from kit.data.read.sources import MEND, shown
from kit.data.samples.bad_rows import SKIPPED_FILE, BadRows, SkippedFile
from kit.data.samples.rows import Encoder, Opened, Piece
from kit.data.samples.samples import MAX_UNUSED, Samples
from kit.errors import Problem, UserError, raise_if

# The cursor of each lane and source: epoch, window in the epoch, items taken of the window.
Cursors = np.ndarray  # int64 [num_sources, lanes, 3]


@dataclass(frozen=True)
class Stream:
    """The data of a run with ``streaming``; it has the same methods as ``kit.data.open.Data``."""

    opened: list[Opened]
    encoder: Encoder
    vocab_size: int  # rows of the model's embedding
    evaluation: Samples | None
    chat_template: Jinja  # to be saved with the model
    notes: tuple[str, ...]  # lines for the user

    @property
    def fingerprint(self) -> str:
        """Identifies the training data and how they are encoded."""
        sources = [(opened.source.digest, opened.key, opened.entry.weight) for opened in self.opened]
        return digest(sources, *self.encoder.key())

    @property
    def names(self) -> list[str]:
        """The names of the sources."""
        return [opened.entry.name for opened in self.opened]

    def whole_epochs_after(self, num_steps: int) -> int:
        """Raise ``ValueError``: only reading it shows where a stream ends. Recipes that would ask are refused."""
        raise ValueError("the end of an epoch is not known in a stream")

    def total_steps(self, recipe: Recipe) -> int:
        """Return the optimiser steps of the whole run: ``max_steps``, which a stream must have."""
        assert recipe.max_steps is not None
        return recipe.max_steps

    def skipped_rows(self) -> list[dict[str, Any]]:
        """Return the rows that are skipped, as far as this is known before the first step: none."""
        return []

    def open_feed(self, recipe: Recipe, ranks: Ranks, pad_token_id: int, state: dict[str, Any]) -> "StreamFeed":
        """Open the stream at ``state``, which ``StreamFeed.state`` returned; empty at the beginning of a run.

        Raises:
            UserError: ``state`` does not belong to this stream.
        """
        return StreamFeed(self, recipe, ranks, pad_token_id, state)

    def describe(self) -> dict[str, Any]:
        """Return what ``run.json`` records of the data."""
        evaluation = self.evaluation and {"fingerprint": self.evaluation.fingerprint, **self.evaluation.report}
        train = {"num_files": sum(len(opened.source.parts) for opened in self.opened)}
        sources = [{"name": name} for name in self.names]
        described = {"train": train, "evaluation": evaluation, "sources": sources}
        return {"fingerprint": self.fingerprint, **described}


def check_beginning(opened: Opened, encoder: Encoder, skips: bool) -> tuple[int, list[str]]:
    """Read and encode the first block of a source.

    Args:
        skips: rows that cannot be used do not matter, unless there are too many of them.

    Returns:
        The largest token id in it, and remarks for the user.

    Raises:
        UserError: the block has no rows, or has rows that cannot be used.
    """
    name, piece = opened.source.name, first_piece(opened, encoder)
    bad = BadRows(piece.bad)
    raise_if(shown(piece.problems + ([] if skips else bad.problems()), name))
    num_rows = piece.counts["num_rows"]
    bad.raise_if_too_many(name, num_rows)
    if not len(piece.samples):
        raise_if(shown(bad.problems(), name, MEND) if not num_rows else [])
        raise UserError(Problem(name, "nothing to learn from in its first rows", "at least one sample"))
    unused = [f"{key} ({count / (num_rows + bad.num_rows):.1%})" for key, count in piece.unused.most_common(MAX_UNUSED)]
    lines = [f"{name}: {text}" for text in piece.remarks]
    lines += [f"{name}: not used in its first rows: {', '.join(unused)}"] if unused else []
    return int(piece.input_ids.max()), lines


def first_piece(opened: Opened, encoder: Encoder) -> Piece:
    """Read and encode the first block of a source. Raises ``UserError`` if it has no rows."""
    source = opened.source
    block = next(iter(source.parts[0].blocks(opened.columns)), None)
    piece = encoder.encode_block(opened, 0, block) if block else None
    if piece is None or not len(piece.samples) + len(piece.problems) + len(piece.bad):
        raise UserError(Problem(source.name, "no row to learn from at its beginning", "at least one"))
    return piece


class StreamFeed:
    """Global batches of a stream; it has the same methods as ``kit.data.feed.feed.Feed``."""

    def __init__(self, stream: Stream, recipe: Recipe, ranks: Ranks, pad_token_id: int, state: dict[str, Any]) -> None:
        """See ``Stream.open_feed``."""
        self._recipe, self._ranks = recipe, ranks
        self._collator = Collator(recipe.micro_batch_size, pad_token_id, recipe.packing)
        num_lanes = recipe.global_batch_size
        weights = np.array([1.0 if opened.entry.weight is None else opened.entry.weight for opened in stream.opened])
        self._shares = np.cumsum(weights / weights.sum())
        self._own_lanes = range(ranks.index, num_lanes, ranks.count)
        self._cursors = np.zeros((len(weights), num_lanes, 3), np.int64)
        self._earlier_counts = np.zeros(len(COUNTS), np.int64)  # counts of the earlier starts of this run
        if state:
            try:
                cursors, before = (np.array(state[name], np.int64) for name in ("cursors", "counts"))
                fits = (
                    cursors.shape == self._cursors.shape
                    and before.shape == self._earlier_counts.shape
                    and cursors.min() >= 0
                )
            except (KeyError, ValueError, TypeError, OverflowError):
                fits = False
            if not fits:
                raise UserError(Problem("resume_from_checkpoint", "its state is no place in this stream"))
            self._cursors, self._earlier_counts = cursors, before
        self._skipped_file = SkippedFile(Path(recipe.output_dir or "") / SKIPPED_FILE)
        self._readers: list[dict[int, SubStream]] = []  # for each source, the sub-stream of each lane
        for number, opened in enumerate(stream.opened):
            num_streams = num_sub_streams([part.size for part in opened.source.parts], num_lanes)
            starts = {lane: tuple(self._cursors[number, lane].tolist()) for lane in self._own_lanes}
            source = StreamedSource(number, opened, stream.encoder, stream.vocab_size)
            readers = []
            for i in {lane % num_streams for lane in self._own_lanes}:
                lanes = range(i, num_lanes, num_streams)
                own = {lane: starts[lane] for lane in lanes if lane in starts}
                readers.append(SubStream(source, recipe, lanes, own))
            self._readers.append({lane: reader for reader in readers for lane in reader.lanes})
        self._all_readers = [reader for readers in self._readers for reader in set(readers.values())]
        self._counts: dict[str, int] = dict(zip(COUNTS, self._earlier_counts.tolist(), strict=True))
        self._ahead = Ahead(self._read, stream.total_steps(recipe))

    def take(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step``, counted from 0. Called by all ranks, for one step after the other."""
        elements, micro_batches, read = self._ahead.take(step)
        counts = np.zeros((3, len(self._shares)))
        self._skipped_file.append([row for reader in self._all_readers for row in reader.skipped()])
        for source, lane, element in elements:
            self._cursors[source, lane] = element.cursor
            for ids, sample_weights in element.samples:
                counts[:, source] += sample_weights[1:].sum(), (sample_weights[1:] > 0).sum(), len(ids)
        epochs = self._cursors[:, list(self._own_lanes), 0].sum()
        summed = self._sum_over_ranks(np.concatenate([counts.reshape(-1), read, [epochs]]))
        counts, totals = summed[: counts.size].reshape(counts.shape), summed[counts.size : -1].astype(int)
        self._counts = dict(zip(COUNTS, (self._earlier_counts + totals).tolist(), strict=True))
        return GlobalBatch(
            micro_batches,
            target_weights=counts[0],
            num_targets=counts[1].astype(np.int64),
            num_tokens=counts[2].astype(np.int64),
            epoch=float(summed[-1]) / self._cursors[:, :, 0].size,
            origins=[origin for _, _, element in elements for origin in element.origins],
            counts=self._counts,
            waited_seconds=self._ahead.waited_seconds,
        )

    def state(self) -> dict[str, Any]:
        """Return the cursors of all lanes after the last step taken, for a checkpoint. Called by all ranks."""
        own = np.zeros_like(self._cursors)
        own[:, list(self._own_lanes)] = self._cursors[:, list(self._own_lanes)]
        return {"cursors": self._sum_over_ranks(own).astype(np.int64).tolist(), "counts": [*self._counts.values()]}

    def notes(self) -> list[str]:
        """Lines for the user at the beginning of the run."""
        return [f"streaming: rows shuffled within {self._recipe.shuffle_buffer_size}"]

    def closing_notes(self) -> list[str]:
        """Lines for the user at the end of the run: the counts over all ranks, and a skipped row of this rank."""
        lines = [f"stream: {count} {COUNTS[name]}" for name, count in self._counts.items() if count]
        first = next((reader.first_skipped for reader in self._all_readers if reader.first_skipped), "")
        return lines + ([f"a skipped row: {first}"] if first else [])

    def _read(self, step: int) -> tuple[list[tuple[int, int, Element]], list[MicroBatch], list[int]]:
        """Read the items of this rank's lanes for ``step``.

        Returns:
            (source, lane, item) for each lane; the items as micro-batches; and this rank's counts of rows so far.
        """
        draws = uniform(self._recipe.global_batch_size, self._recipe.seed, MIX, step)
        sources = np.searchsorted(self._shares, draws, side="right").clip(max=len(self._shares) - 1)
        elements = [
            (int(sources[lane]), lane, self._readers[sources[lane]][lane].take(lane)) for lane in self._own_lanes
        ]
        rows = _Rows(elements)
        shares = self._collator.deal(rows.lengths, rows.items, num_ranks=1)
        micro_batches = [self._collator.collate(rows, share) for (share,) in shares]
        return elements, micro_batches, [sum(reader.counts[name] for reader in self._all_readers) for name in COUNTS]

    def _sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        return self._ranks.sum(torch.from_numpy(values.astype(np.float64))).numpy()


class _Rows:
    """The samples of one step in the form that ``Collator.collate`` takes."""

    def __init__(self, elements: Sequence[tuple[int, int, Element]]) -> None:
        sizes = [len(element.samples) for _, _, element in elements]
        self._samples = [sample for _, _, element in elements for sample in element.samples]
        self.lengths = np.array([len(ids) for ids, _ in self._samples])
        self.sources = np.repeat([source for source, _, _ in elements], sizes)
        self.items: list[Item] = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self._samples[i]
