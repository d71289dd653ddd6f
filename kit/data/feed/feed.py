"""The global batch of each step: this rank's micro-batches, and counts over all ranks.

``Feed`` takes its samples from the cache, ``kit.data.stream.stream.StreamFeed`` reads them during training. Both have
the same methods, so the loop need not know which one it uses.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from kit.config.settings.data import DataSettings
from kit.data.feed.batches import Collator, MicroBatch
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.mismatched import Mismatched
from kit.data.feed.order import Order
from kit.data.feed.packing import pack
from kit.data.samples.records import Table
from kit.data.samples.samples import Samples
from kit.system.phases import READING, Phase
from kit.system.visible import one_line

MANY_PASSES = 20  # more passes over a dataset in one epoch give a warning: the model would memorise it


@dataclass(frozen=True)
class GlobalBatch:
    """The data of one optimiser step. The counts are over all ranks, one count for each dataset."""

    micro_batches: list[MicroBatch]  # of this rank
    target_weights: np.ndarray  # float64 [num_datasets]: sums of the targets' weights; their total divides the loss
    num_targets: np.ndarray  # int64 [num_datasets]
    num_tokens: np.ndarray  # int64 [num_datasets]
    epoch: float  # epochs seen after this step
    origins: list[str]  # ``file:line`` of all samples
    num_samples: int = 0  # over all ranks; of pairs the number of pairs
    chosen_weight: float = 0.0  # over all ranks, of pairs: the sum of the weights of targets in chosen answers
    mismatched: list[MicroBatch] = field(default_factory=list)  # of this rank: those of ``Mismatched``, for kto
    most_targets: int = 0  # over all ranks, of rollouts: the tokens that the model might have written
    # For ``metrics.jsonl``: of a stream rows skipped, cut and left out so far; of rollouts their rewards.
    metrics: Mapping[str, float] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)  # of rollouts: some, to be shown
    waited_seconds: float = 0.0  # how long this rank waited until its data were ready


class BatchSource(Protocol):
    """Where the global batches come from: ``Feed``, ``kit.data.stream.stream.StreamFeed`` or ``kit.rollouts``.

    Attributes:
        phase: of the run while it waits for a batch.
    """

    phase: Phase

    def take(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step``, counted from 0. Called by all ranks, for one step after another."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values, from which a later start gives the same batches."""

    def notes(self) -> list[str]:
        """Return lines for the user before the first step."""

    def closing_notes(self) -> list[str]:
        """Return lines for the user at the end of the run."""


def counted(table: Table, indices: np.ndarray, num_datasets: int) -> GlobalBatch:
    """Return the counts of a batch of the samples at ``indices``, without micro-batches."""
    dataset_ids = table.dataset_ids[indices]

    def by_dataset(values: np.ndarray) -> np.ndarray:
        return np.bincount(dataset_ids, values[indices], num_datasets)

    return GlobalBatch(
        [],
        target_weights=by_dataset(table.target_weights),
        num_targets=by_dataset(table.num_targets).astype(np.int64),
        num_tokens=by_dataset(table.lengths).astype(np.int64),
        epoch=0.0,
        origins=[],
        num_samples=len(indices),
        chosen_weight=table.kind.chosen_weight(table, indices),
    )


def by_file(origins: Iterable[str]) -> str:
    """Write several origins ``file:line`` in short form: ``a.jsonl:3,17 b.jsonl:4``."""
    numbers: dict[str, list[str]] = {}  # of each file
    for origin in origins:
        file = origin.rstrip("0123456789")
        numbers.setdefault(file, []).append(origin.removeprefix(file))
    return one_line(" ".join(file + ",".join(of_file) for file, of_file in numbers.items()))


T = TypeVar("T")


class Ahead(Generic[T]):
    """Prepares the data of the next step in a background thread while a step runs."""

    def __init__(self, make: Callable[[int], T], num_steps: int) -> None:
        """
        Args:
            make: prepares the data of a step, counted from 0. It is called once per step, in the order of the steps.
            num_steps: the number of steps in the run.
        """
        self._make = make
        self._num_steps = num_steps
        self._thread = ThreadPoolExecutor(1)
        # Else the thread of the loop, which a GPU waits for, may wait 5 ms each time for the interpreter.
        sys.setswitchinterval(1e-4)
        self._made: dict[int, Future[T]] = {}
        self.waited_seconds = 0.0  # in the last ``take``

    def take(self, step: int) -> T:
        """Wait for the data of ``step`` and return it; begin to prepare those of the next step."""
        began = time.perf_counter()
        for number in (step, step + 1):
            # Nothing is prepared beyond the last step: the process would have to wait for it at its end.
            if number not in self._made and number < max(self._num_steps, step + 1):
                self._made[number] = self._thread.submit(self._make, number)
        made = self._made.pop(step).result()
        self.waited_seconds = time.perf_counter() - began
        return made


class Feed:
    """Global batches of samples in the cache."""

    phase = READING

    def __init__(
        self,
        samples: Samples,
        order: Order,
        settings: DataSettings,
        micro_batch_size: int,
        ranks: Ranks,
        pad_token_id: int,
        num_steps: int,
        mismatched: Mismatched | None = None,
    ) -> None:
        """
        Args:
            micro_batch_size: items.
            num_steps: the number of steps in the run.
            mismatched: mismatched prompt-completion pairs, for kto.
        """
        self._mismatched = mismatched
        self._samples = samples
        self._order = order
        self._settings = settings
        self._ranks = ranks
        self._collator = Collator(micro_batch_size, pad_token_id, settings.packing, settings.max_length)
        self._ahead = Ahead(self._make, num_steps)

    def take(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step``, counted from 0."""
        return replace(self._ahead.take(step), waited_seconds=self._ahead.waited_seconds)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: nothing, since the step's number determines its samples."""
        return {}

    def notes(self) -> list[str]:
        """Lines for the user: how full packs are, and how often each dataset is used in an epoch."""
        return ([self._packing_note()] if self._settings.packing else []) + self._mixing_notes()

    def _packing_note(self) -> str:
        epoch = self._order.epoch(0)
        # Both halves of a pair are in one pack.
        capacity = self._settings.max_length * self._samples.sequence_lengths.shape[1]
        share = self._samples.lengths[epoch.members].sum(dtype=np.int64) / (len(epoch) * capacity)
        return f"packing: {len(epoch)} packs of {capacity} tokens, {share:.2%} full"

    def _mixing_notes(self) -> list[str]:
        """One line for each dataset, if they have weights."""
        if not self._order.quotas:
            return []
        quotas = np.array(self._order.quotas)
        passes, shares = quotas / self._order.sizes, quotas / quotas.sum()
        lines = []
        for name, num, share in zip(self._samples.dataset_names, passes, shares, strict=True):
            line = f"mixing: {name} {share:.1%} of the samples, {num:.2f} passes an epoch"
            lines.append(f"warning: {line}" if num > MANY_PASSES else line)
        return lines

    def closing_notes(self) -> list[str]:
        """Lines for the user at the end of the run: none."""
        return []

    def _make(self, step: int) -> GlobalBatch:
        items = self._order.batch(step)
        indices = np.concatenate(items)
        return replace(
            counted(self._samples, indices, len(self._samples.stores)),
            micro_batches=self._collator.micro_batches(self._samples, items, self._ranks),
            epoch=self._order.epochs_after(step + 1),
            origins=[self._samples.origin(i) for i in indices.tolist()],
            mismatched=self._mismatched_of(indices),
        )

    def _mismatched_of(self, indices: np.ndarray) -> list[MicroBatch]:
        if self._mismatched is None:
            return []
        items = list(indices[:, None])
        if self._settings.packing:  # of other lengths than the samples, so in packs of their own
            packs = pack(self._mismatched.lengths[indices], self._settings.max_length)
            items = [indices[members] for members in packs.items()]
        return self._collator.micro_batches(self._mismatched, items, self._ranks)
