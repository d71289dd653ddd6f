"""Which samples each step of a run sees: a pure function of (seed, step). No sampler, no state, nothing to save.

Promises:

- The number of processes and the micro-batch size have no say in it; packed or not, the same on every topology.
- Every global batch is full, so a run that is extended goes on exactly where it ended.
- Sources with weights get their shares in every epoch, and each goes through its own samples in passes: none comes
  twice before all have come once.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np

from kit.data.feed.packing import Packs, pack

# What is drawn by chance; each from streams of its own.
EPOCH, PASS, PACKS, SPLIT, MIX, LANE, PARTS = range(7)


def permutation(num: int, seed: int, kind: int, number: int = 0, source: int = 0) -> np.ndarray:
    """int64 [num]. Sorts raw words of the generator: numpy guarantees those, not its shuffling, for ever."""
    return np.argsort(_words(num, seed, kind, number, source), kind="stable")


def uniform(num: int, seed: int, kind: int, number: int = 0) -> np.ndarray:
    """float64 [num] in [0, 1)."""
    return (_words(num, seed, kind, number, 0) >> np.uint64(11)) * 2.0**-53


def _words(num: int, seed: int, kind: int, number: int, source: int) -> np.ndarray:
    key, counter = np.array([seed, number], np.uint64), np.array([0, 0, source, kind], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(num)


class Order:
    """Items of a run, endless: samples, or packs of samples where a ``capacity`` is given.

    Args:
        lengths: int [N], tokens of each sample.
        sources: int [N], number of the source of each sample.
        weights: share of each source, in ``mixing``; None: each sample once in an epoch.
        capacity: tokens in a pack; None: no packing.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        sources: np.ndarray,
        seed: int,
        batch_size: int,
        weights: Sequence[float] | None = None,
        mixing: Literal["samples", "tokens"] = "samples",
        capacity: int | None = None,
    ) -> None:
        self._lengths, self._seed, self._batch_size, self._capacity = lengths, seed, batch_size, capacity
        self._members = [np.flatnonzero(sources == i) for i in range(len(weights))] if weights else []
        self.quotas = self._make_quotas(weights, mixing) if weights else []  # samples of each source in an epoch
        # Different samples make different numbers of packs; otherwise all epochs are equally long.
        self._varies = bool(weights) and capacity is not None
        self._ends: list[int] = []  # items in the epochs up to each, where they vary
        self._epochs: dict[int, Packs] = {}

    def _make_quotas(self, weights: Sequence[float], mixing: str) -> list[int]:
        shares = np.array(weights) / max(weights)
        shares /= shares.sum()
        if mixing == "tokens":
            num_tokens = [self._lengths[members].sum(dtype=np.int64) for members in self._members]
            sizes = [len(members) for members in self._members]
            quotas = shares * sum(num_tokens) * sizes / num_tokens
        else:
            quotas = shares * len(self._lengths)
        return [max(1, round(quota)) for quota in quotas]

    def _samples(self, epoch: int) -> np.ndarray:
        """The samples of an epoch, in its order."""
        if not self.quotas:
            return permutation(len(self._lengths), self._seed, EPOCH, epoch)
        chosen = []
        for source, (members, quota) in enumerate(zip(self._members, self.quotas, strict=True)):
            first, size = epoch * quota, len(members)
            passes = range(first // size, (first + quota - 1) // size + 1)
            order = np.concatenate([permutation(size, self._seed, PASS, number, source) for number in passes])
            chosen.append(members[order[first % size :][:quota]])
        samples = np.concatenate(chosen)
        return samples[permutation(len(samples), self._seed, EPOCH, epoch)]

    def epoch(self, number: int) -> Packs:
        """The items of epoch ``number`` in their order; an item has one sample, or those of a pack."""
        if number not in self._epochs:
            samples = self._samples(number)
            if self._capacity is None:
                items = Packs(samples, np.arange(len(samples) + 1))
            else:
                packs = pack(self._lengths[samples], self._capacity)
                order = permutation(len(packs), self._seed, PACKS, number)
                sizes = np.diff(packs.starts)[order]
                starts = np.concatenate([[0], np.cumsum(sizes)])
                inside = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)  # position within its pack
                items = Packs(samples[packs.members[np.repeat(packs.starts[:-1][order], sizes) + inside]], starts)
            while len(self._epochs) > 1:  # a step may lie across two epochs
                self._epochs.pop(min(self._epochs))
            self._epochs[number] = items
        return self._epochs[number]

    def num_items(self, epoch: int) -> int:
        if self._capacity is None:
            return sum(self.quotas) or len(self._lengths)
        return len(self.epoch(epoch if self._varies else 0))

    def total_steps(self, num_epochs: float) -> int:
        """Steps that see all items of ``num_epochs`` epochs, rounded up."""
        # As the decimal that was written: in binary 1.1 epochs of 10 samples would be more than 11 samples.
        whole, rest = divmod(Fraction(str(num_epochs)), 1)
        num_items = sum(self.num_items(epoch) for epoch in range(whole)) if self._varies else whole * self.num_items(0)
        return math.ceil((num_items + (rest * self.num_items(whole) if rest else 0)) / self._batch_size)

    def batch(self, step: int) -> list[np.ndarray]:
        """The global batch of ``step`` (from 0): the samples of each of its items.

        Slot s of the run is position s of its epochs, one after another. A batch runs on across the end of an epoch,
        the last one of a run too: where a run ends does not change any of its batches.
        """
        first = step * self._batch_size
        items = []
        for slot in range(first, first + self._batch_size):
            epoch, position = self._locate(slot)
            packs = self.epoch(epoch)
            items.append(packs.members[packs.starts[position] : packs.starts[position + 1]])
        return items

    def epochs_after(self, num_steps: int) -> float:
        """How many epochs ``num_steps`` steps have seen."""
        epoch, position = self._locate(num_steps * self._batch_size)
        return epoch + position / self.num_items(epoch)

    def _locate(self, slot: int) -> tuple[int, int]:
        """Epoch, and position within it."""
        if not self._varies:
            return divmod(slot, self.num_items(0))
        while not self._ends or self._ends[-1] <= slot:
            self._ends.append((self._ends or [0])[-1] + self.num_items(len(self._ends)))
        epoch = int(np.searchsorted(self._ends, slot, side="right"))
        return epoch, slot - (self._ends[epoch - 1] if epoch else 0)
