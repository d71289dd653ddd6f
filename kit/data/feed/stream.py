"""Streaming: training data that is read during training, for data sets that do not fit on a disk.

Promises:

- The same samples are in the same global batches on every topology. A stream has one lane for each item of a global
  batch; item i of each step comes from lane i, and a rank reads only for its own lanes.
- Resume is exact: a checkpoint stores one cursor for each lane and data set, so no sample is repeated or left out.
  Counts of skipped and cut rows begin anew.
- Rows are shuffled within windows of ``shuffle_buffer_size`` rows, and the order of files changes in each epoch.
- On several machines, pieces of the files are compared before any weight is loaded.
- The first rows are checked before any weight is loaded. Later, a row that cannot be used is skipped, counted and
  listed in ``SKIPPED_FILE``; with ``on_bad_row`` error it ends the run. Too many such rows end it too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.cache import digest
from kit.config.settings.data import DataSettings
from kit.config.settings.optimisation import OptimSettings
from kit.data.chat.template import Jinja
from kit.data.feed.batches import Collator, Item, MicroBatch
from kit.data.feed.feed import Ahead, GlobalBatch
from kit.data.feed.lanes import COUNTS, Cursor, Element, StreamedDataset, SubStream, num_sub_streams
from kit.data.feed.order import MIX, uniform
from kit.data.feed.ranks import Ranks
from kit.data.read.sources import shown
from kit.data.samples.bad_rows import SKIPPED_FILE, BadRows, SkippedFile
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder, Piece
from kit.data.samples.samples import MAX_UNUSED, Samples
from kit.errors import Problem, UserError, raise_if

NUM_PIECES = 256  # of the files, that machines compare before the first step


@dataclass(frozen=True)
class Stream:
    """The data of a run with ``streaming``; it has the same methods as ``kit.data.open.Data``."""

    settings: DataSettings
    seed: int
    datasets: list[Dataset]  # to train on
    encoder: Encoder
    evaluation: Samples | None
    notes: tuple[str, ...] = ()  # lines for the user

    @property
    def chat_template(self) -> Jinja:
        """The template to be saved with the model."""
        return self.encoder.template

    @property
    def fingerprint(self) -> str:
        """Identifies the training data and how they are encoded."""
        contents = [(dataset.source.digest, dataset.key, dataset.entry.weight) for dataset in self.datasets]
        return digest(contents, *self.encoder.key())

    def contents(self) -> dict[str, str]:
        """Return what machines compare of the training data, by what a message names. Reads pieces of the files."""
        num = len(self.datasets)
        pieces = [dataset.source.sampled_digest(max(4, NUM_PIECES // num)) for dataset in self.datasets]
        if num == 1:
            return {"dataset": digest(self.fingerprint, *pieces)}
        of_each = {f"dataset, entry {i} of {num}": piece for i, piece in enumerate(pieces, start=1)}
        return {"dataset": self.fingerprint, **of_each}

    @property
    def dataset_names(self) -> list[str]:
        """The names of the training data sets."""
        return [dataset.entry.name for dataset in self.datasets]

    def mismatched(self, samples: Samples) -> None:
        """Return None: answers with a label are not read from a stream."""

    def whole_epochs_after(self, num_steps: int) -> int:
        """Raise ``ValueError``: only reading it shows where a stream ends. Recipes that would ask are refused."""
        raise ValueError("the end of an epoch is not known in a stream")

    def total_steps(self, settings: OptimSettings) -> int:
        """Return the optimiser steps of the whole run: ``max_steps``, which a stream must have."""
        assert settings.max_steps is not None
        return settings.max_steps

    def skipped_rows(self) -> list[dict[str, Any]]:
        """Return the rows that are skipped, as far as this is known before the first step: none."""
        return []

    def open_feed(
        self,
        settings: OptimSettings,
        ranks: Ranks,
        pad_token_id: int,
        state: Mapping[str, Any],
        output_dir: str | None = None,
    ) -> "StreamFeed":
        """Open the global batches of the run.

        Args:
            state: where to begin, as ``StreamFeed.state`` returned it; empty at the beginning of a run.
            output_dir: where skipped rows are listed; None: the current folder.

        Raises:
            UserError: ``state`` does not belong to this stream.
        """
        return StreamFeed(self, settings, ranks, pad_token_id, state, Path(output_dir or "") / SKIPPED_FILE)

    def describe(self) -> dict[str, Any]:
        """Return what ``run.json`` records of the data."""
        evaluation = None
        if self.evaluation is not None:
            evaluation = {"fingerprint": self.evaluation.fingerprint, **self.evaluation.report}
        return {
            "fingerprint": self.fingerprint,
            "train": {"num_files": sum(len(dataset.source.parts) for dataset in self.datasets)},
            "evaluation": evaluation,
            "sources": [
                {"name": name, **({"commit": each.source.commit} if each.source.commit else {})}
                for name, each in zip(self.dataset_names, self.datasets, strict=True)
            ],
        }


def check_beginning(dataset: Dataset, encoder: Encoder, skips: bool) -> list[str]:
    """Read and encode the first block of a data set, and return remarks for the user.

    Args:
        skips: rows that cannot be used do not matter, unless there are too many of them.

    Raises:
        UserError: the block has no rows, rows that cannot be used, or nothing to learn from.
    """
    name = dataset.source.name
    piece = first_piece(dataset, encoder)
    bad = BadRows(piece.bad)
    num_good = piece.counts["num_rows"]
    raise_if(shown(piece.problems, name, "") if skips else bad.shown(name, num_good, piece.problems))
    bad.raise_if_too_many(name, num_good)
    if not len(piece):
        found = "nothing to learn from in its first rows"
        if num_long := piece.counts["num_dropped_long"]:
            found += f": {num_long} of {num_good} are longer than max_length and dropped"
        raise UserError(Problem(name, found, "at least one sample"), *bad.problems())
    lines = [f"{name}: {text}" for text in piece.remarks]
    num_rows = num_good + bad.num_rows
    unused = [f"{key} ({count / num_rows:.1%})" for key, count in piece.unused.most_common(MAX_UNUSED)]
    if unused:
        lines.append(f"{name}: not used in its first rows: {', '.join(unused)}")
    if missing := dataset.missing_texts(piece.replaced):
        lines.append(f"warning: {name}: replace: its first rows have no {', '.join(map(repr, missing))}")
    return lines


def first_piece(dataset: Dataset, encoder: Encoder) -> Piece:
    """Read and encode the first block of a data set. Raises ``UserError`` if it has no rows."""
    source = dataset.source
    block = next(iter(source.parts[0].blocks(dataset.columns)), None)
    if block is not None:
        piece = encoder.encode_block(dataset, 0, block)
        if len(piece) or piece.problems or piece.bad or piece.counts["num_rows"]:
            return piece
    raise UserError(Problem(source.name, "no row to learn from at its beginning", "at least one"))


class StreamFeed:
    """Global batches of a stream; it has the same methods as ``kit.data.feed.feed.Feed``."""

    def __init__(
        self,
        stream: Stream,
        settings: OptimSettings,
        ranks: Ranks,
        pad_token_id: int,
        state: Mapping[str, Any],
        skipped_file: Path,
    ) -> None:
        """See ``Stream.open_feed``. Skipped rows are listed in ``skipped_file``."""
        self._settings = stream.settings
        self._seed = stream.seed
        self._has_preferences = stream.encoder.wanted != "answers"
        self._ranks = ranks
        self._collator = Collator(
            settings.micro_batch_size, pad_token_id, stream.settings.packing, stream.settings.max_length
        )
        self._num_lanes = settings.global_batch_size
        self._own_lanes = range(ranks.index, self._num_lanes, ranks.count)
        weights = [1.0 if dataset.entry.weight is None else dataset.entry.weight for dataset in stream.datasets]
        self._sums_of_shares = np.cumsum(np.array(weights) / np.sum(weights))
        # The cursor of each data set and lane.
        self._cursors = np.zeros((len(weights), self._num_lanes, 3), np.int64)
        if state:
            self._cursors = self._checked(state)
        self._skipped_file = SkippedFile(skipped_file)
        # For each data set, the sub-stream of each of this rank's lanes.
        self._sub_streams = [self._open_sub_streams(stream, i) for i in range(len(stream.datasets))]
        self._all_sub_streams = [each for by_lane in self._sub_streams for each in set(by_lane.values())]
        self._counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self._ahead = Ahead(self._read, stream.total_steps(settings))

    def _checked(self, state: Mapping[str, Any]) -> np.ndarray:
        """The cursors of ``state``. Raises ``UserError`` if they do not belong to this stream."""
        try:
            cursors = np.array(state["cursors"], np.int64)
            if cursors.shape == self._cursors.shape and cursors.min() >= 0:
                return cursors
        except (KeyError, ValueError, TypeError, OverflowError):
            pass
        raise UserError(Problem("resume_from_checkpoint", "the checkpoint does not match this stream"))

    def _open_sub_streams(self, stream: Stream, dataset_id: int) -> dict[int, SubStream]:
        """Open the sub-streams of a data set that serve this rank's lanes. Returns the sub-stream of each of them."""
        dataset = stream.datasets[dataset_id]
        streamed = StreamedDataset(dataset_id, dataset, stream.encoder, stream.settings, stream.seed)
        num_streams = num_sub_streams([part.size for part in dataset.source.parts], self._num_lanes)
        by_lane: dict[int, SubStream] = {}
        for first in {lane % num_streams for lane in self._own_lanes}:
            lanes = range(first, self._num_lanes, num_streams)
            starts: dict[int, Cursor] = {}
            for lane in lanes:
                if lane in self._own_lanes:
                    epoch, window, num_taken = self._cursors[dataset_id, lane].tolist()
                    starts[lane] = (epoch, window, num_taken)
            by_lane |= dict.fromkeys(starts, SubStream(streamed, lanes, starts))
        return by_lane

    def take(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step``, counted from 0. Called by all ranks, for one step after the other."""
        elements, micro_batches, row_counts = self._ahead.take(step)
        self._skipped_file.append([row for sub_stream in self._all_sub_streams for row in sub_stream.skipped()])
        # Sums of weights, targets and tokens, of samples, and of the weights in the first half of pairs; by data set.
        sums = np.zeros((5, len(self._sub_streams)))
        for dataset_id, lane, element in elements:
            self._cursors[dataset_id, lane] = element.cursor
            for sequences in element.samples:
                sums[3:, dataset_id] += 1, sequences[0][1][1:].sum()
                for ids, sample_weights in sequences:
                    target_weights = sample_weights[1:]
                    sums[:3, dataset_id] += target_weights.sum(), (target_weights > 0).sum(), len(ids)
        epochs = self._cursors[:, list(self._own_lanes), 0].sum()
        summed = self._sum_over_ranks(np.concatenate([sums.reshape(-1), row_counts, [epochs]]))
        sums, all_row_counts, _ = np.split(summed, np.cumsum([sums.size, len(row_counts)]))
        sums, all_row_counts = sums.reshape(5, -1), all_row_counts.astype(int)
        self._counts = dict(zip(COUNTS, all_row_counts.tolist(), strict=True))
        return GlobalBatch(
            micro_batches,
            target_weights=sums[0],
            num_targets=sums[1].astype(np.int64),
            num_tokens=sums[2].astype(np.int64),
            epoch=float(summed[-1]) / self._cursors[:, :, 0].size,
            origins=[origin for _, _, element in elements for origin in element.origins],
            num_samples=int(sums[3].sum()),
            chosen_weight=float(sums[4].sum()) if self._has_preferences else 0.0,
            counts=self._counts,
            waited_seconds=self._ahead.waited_seconds,
        )

    def state(self) -> dict[str, Any]:
        """Return the cursors of all lanes after the last step taken, for a checkpoint. Called by all ranks."""
        own = np.zeros_like(self._cursors)
        own_lanes = list(self._own_lanes)
        own[:, own_lanes] = self._cursors[:, own_lanes]
        cursors = self._sum_over_ranks(own).astype(np.int64)
        return {"cursors": cursors.tolist()}

    def notes(self) -> list[str]:
        """Lines for the user at the beginning of the run."""
        return [f"streaming: rows shuffled within {self._settings.shuffle_buffer_size}"]

    def closing_notes(self) -> list[str]:
        """Lines for the user at the end of the run: the counts over all ranks, and a skipped row of this rank."""
        lines = [f"stream: {count} {COUNTS[name]}" for name, count in self._counts.items() if count]
        for sub_stream in self._all_sub_streams:
            if sub_stream.first_skipped:
                return [*lines, f"a skipped row: {sub_stream.first_skipped}"]
        return lines

    def _read(self, step: int) -> tuple[list[tuple[int, int, Element]], list[MicroBatch], list[int]]:
        """Read the items of this rank's lanes for ``step``.

        Returns:
            (data set, lane, item) for each lane; the items as micro-batches; and this rank's counts of rows so far, in
            the order of ``COUNTS``.
        """
        draws = uniform(self._num_lanes, self._seed, MIX, step)
        drawn = np.searchsorted(self._sums_of_shares, draws, side="right")
        dataset_ids = drawn.clip(max=len(self._sub_streams) - 1).tolist()  # of each lane
        elements = []
        for lane in self._own_lanes:
            dataset_id = dataset_ids[lane]
            elements.append((dataset_id, lane, self._sub_streams[dataset_id][lane].take(lane)))
        rows = _Rows(elements, self._has_preferences)
        shares = self._collator.deal(rows.lengths, rows.items, num_ranks=1)
        micro_batches = [rows.numbered(self._collator.collate(rows, share)) for (share,) in shares]
        counts = [sum(sub_stream.counts[name] for sub_stream in self._all_sub_streams) for name in COUNTS]
        return elements, micro_batches, counts

    def _sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        return self._ranks.sum(torch.from_numpy(values.astype(np.float64))).numpy()


class _Rows:
    """The samples of one step in the form that ``Collator.collate`` takes."""

    references = None

    def __init__(self, elements: Sequence[tuple[int, int, Element]], has_preferences: bool) -> None:
        sizes = [len(element.samples) for _, _, element in elements]
        self._samples = [sample for _, _, element in elements for sample in element.samples]
        totals = [[len(ids) for ids, _ in sequences] for sequences in self._samples]
        self.lengths = np.array([max(each) if has_preferences else sum(each) for each in totals])
        self.labels = np.ones(len(self._samples), bool) if has_preferences else None
        self.dataset_ids = np.repeat([dataset_id for dataset_id, _, _ in elements], sizes)
        self.items: list[Item] = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        lanes = np.repeat([lane for _, lane, _ in elements], sizes)
        self._numbers = lanes << 32 | np.concatenate([np.arange(size) for size in sizes])

    def numbered(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch with numbers of its samples that do not depend on which lanes this rank has."""
        segments = [(start, length, int(self._numbers[i])) for start, length, i in micro_batch.segments]
        return replace(micro_batch, segments=tuple(segments))

    def sequences(self, i: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """See ``Samples.sequences``."""
        return self._samples[i]
