"""Streaming: training data that is read during training, for datasets that do not fit on a disk.

Promises:

- The same samples are in the same global batches on every topology: every rank reads and tokenises the whole stream,
  and computes its share of each batch. So no rank asks another one for anything.
- Resume is exact: a checkpoint stores a cursor for each dataset, so no sample is repeated or left out. Counts of
  skipped and truncated rows begin again.
- Rows are shuffled within windows of ``shuffle_buffer_size`` rows, and the order of files changes in each epoch.
- On several machines, pieces of the files are compared before any weight is loaded.
- The first rows are checked before any weight is loaded. Later, a row that cannot be used is skipped, counted and
  listed in ``SKIPPED_FILE``; with ``on_bad_row`` error it ends the run. Too many such rows end it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kit.config.settings.optimisation import OptimSettings
from kit.data.chat.tokens import MediaCodec
from kit.data.feed.batches import Collator
from kit.data.feed.data import Data
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import Ahead, GlobalBatch, counted
from kit.data.feed.order import MIX, uniform
from kit.data.read.sources import read_blocks
from kit.data.samples.bad_rows import LOSSES, SKIPPED_FILE, BadRow, append_listed, notes_of
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder, Piece
from kit.data.samples.samples import Samples
from kit.data.stream.windows import COUNTS, Cursor, Element, Windows
from kit.system.cache import digest
from kit.system.errors import UserError
from kit.system.phases import READING


@dataclass(frozen=True)
class Stream(Data):
    """The data of a run with ``streaming``."""

    @property
    def media(self) -> MediaCodec | None:
        """See ``Data``: later rows may have some, if the model reads any."""
        return self.encoder.media

    @cached_property
    def looked_at(self) -> Samples:
        """See ``Data``."""
        pieces = [(dataset, first_piece(dataset, self.encoder)) for dataset in self.datasets]
        return Samples([self.encoder.as_store(*each) for each in pieces])

    @property
    def fingerprint(self) -> str:
        """Identifies the training data and how they are encoded."""
        contents = [(dataset.source.digest, dataset.key, dataset.entry.weight) for dataset in self.datasets]
        return digest(contents, *self.encoder.key())

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
        """See ``Data``."""
        return StreamFeed(self, settings, ranks, pad_token_id, state, Path(output_dir or "") / SKIPPED_FILE)

    def describe(self) -> dict[str, Any]:
        """Return what ``run.json`` records of the data."""
        return {
            "fingerprint": self.fingerprint,
            "train": {"num_files": sum(len(dataset.source.parts) for dataset in self.datasets)},
            "evaluation": self.evaluation.report if self.evaluation else None,
            "sources": [
                {"name": name, "commit": each.source.commit}
                for name, each in zip(self.dataset_names, self.datasets, strict=True)
            ],
        }


def check_beginning(dataset: Dataset, encoder: Encoder, skips: bool) -> list[str]:
    """Read and encode the first block of a dataset. Returns remarks for the user.

    Args:
        skips: rows that cannot be used do not matter, unless there are too many of them.

    Raises:
        UserError: the block has no rows, rows that cannot be used, or no supervised token.
    """
    piece, name = first_piece(dataset, encoder), f"{dataset.source.name} (first rows)"
    piece.check(name, skips, len(piece))
    return notes_of(name, piece.record(), encoder.max_length)


def first_piece(dataset: Dataset, encoder: Encoder) -> Piece:
    """Read and encode the first block of a dataset."""
    return encoder.encode_block(dataset, *next(read_blocks(dataset.source.parts, dataset.columns)))


class StreamFeed:
    """Global batches of a stream; it has the same methods as ``kit.data.feed.feed.Feed``."""

    phase = READING

    def __init__(
        self,
        stream: Stream,
        settings: OptimSettings,
        ranks: Ranks,
        pad_token_id: int,
        state: Mapping[str, Any],
        skipped_file: Path,
    ) -> None:
        """See ``Data.open_feed``. Skipped rows are listed in ``skipped_file``."""
        self._stream = stream
        self._ranks = ranks
        self._collator = Collator(
            settings.micro_batch_size, pad_token_id, stream.settings.packing, stream.settings.max_length
        )
        self._batch_size = settings.global_batch_size
        weights = [1.0 if dataset.entry.weight is None else dataset.entry.weight for dataset in stream.datasets]
        self._sums_of_shares = np.cumsum(np.array(weights) / np.sum(weights))
        self._cursors = self._checked(state) if state else [(0, 0, 0)] * len(weights)  # after the last step taken
        self._items = [
            Windows(i, dataset, stream.encoder, stream.settings, stream.seed).items(cursor)
            for i, (dataset, cursor) in enumerate(zip(stream.datasets, self._cursors, strict=True))
        ]
        self._counts: list[Mapping[str, int]] = [{}] * len(weights)  # of each dataset
        self._skipped_file = skipped_file
        self._first_skipped = ""
        self._ahead = Ahead(self._read, stream.total_steps(settings))

    def _checked(self, state: Mapping[str, Any]) -> list[Cursor]:
        """The cursors of ``state``. Raises ``UserError`` if they do not belong to this stream."""
        try:
            cursors = np.array(state["cursors"], np.int64)
            if cursors.shape == (len(self._stream.datasets), 3) and cursors.min() >= 0:
                return [(epoch, window, num_taken) for epoch, window, num_taken in cursors.tolist()]
        except (KeyError, ValueError, TypeError, OverflowError):
            pass
        raise UserError("resume_from_checkpoint", "the checkpoint does not match this stream")

    def take(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step``, counted from 0. Called for one step after the other."""
        elements, batch = self._ahead.take(step)
        skipped: list[BadRow] = []
        for element in elements:
            self._cursors[element.dataset_id] = element.cursor
            self._counts[element.dataset_id] = element.counts
            skipped += element.skipped
        if skipped and self._ranks.index == self._ranks.part == 0:  # the other processes skip the same rows
            append_listed(self._skipped_file, skipped)
        if skipped and not self._first_skipped:
            self._first_skipped = str(skipped[0].problem_with_origin)
        return replace(
            batch,
            epoch=float(np.mean([epoch for epoch, _, _ in self._cursors])),
            metrics={name: count for name in COUNTS if (count := sum(each.get(name, 0) for each in self._counts))},
            waited_seconds=self._ahead.waited_seconds,
        )

    def state(self) -> dict[str, Any]:
        """Return the cursor of each dataset after the last step taken, for a checkpoint."""
        return {"cursors": [list(cursor) for cursor in self._cursors]}

    def notes(self) -> list[str]:
        """Lines for the user at the beginning of the run."""
        return [f"streaming: rows shuffled within {self._stream.settings.shuffle_buffer_size}"]

    def closing_notes(self) -> list[str]:
        """Lines for the user at the end of the run: the counts of rows, and one that was skipped."""
        totals = {name: sum(counts.get(name, 0) for counts in self._counts) for name in COUNTS}
        words = {"skipped_rows": "rows could not be used, and were skipped"}
        words |= {name: f"samples {text}" for name, text in LOSSES.items()}
        length = self._stream.settings.max_length
        lines = [f"stream: {count} {words[name].format(length)}" for name, count in totals.items() if count]
        return [*lines, f"a skipped row: {self._first_skipped}"] if self._first_skipped else lines

    def _read(self, step: int) -> tuple[list[Element], GlobalBatch]:
        """Read the items of ``step``, and make its global batch."""
        draws = uniform(self._batch_size, self._stream.seed, MIX, step)
        drawn = np.searchsorted(self._sums_of_shares, draws, side="right").clip(max=len(self._items) - 1)
        elements = [next(self._items[dataset_id]) for dataset_id in drawn.tolist()]
        distinct = list({id(element.store): element for element in elements}.values())
        sizes = [len(element.store.arrays["samples"]) for element in distinct]
        firsts = {id(each.store): first for each, first in zip(distinct, np.cumsum([0, *sizes]).tolist(), strict=False)}
        index = np.concatenate([firsts[id(element.store)] + element.members for element in elements])
        dataset_ids = [element.dataset_id for element in distinct]
        samples = Samples([element.store for element in distinct], "", index, dataset_ids)
        every = np.arange(len(samples))
        items = np.split(every, np.cumsum([len(element.members) for element in elements])[:-1])
        return elements, replace(
            counted(samples, every, len(self._items)),
            micro_batches=self._collator.micro_batches(samples, items, self._ranks),
            origins=[samples.origin(i) for i in every.tolist()],
        )
