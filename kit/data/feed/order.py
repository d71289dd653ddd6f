"""The order of the samples: which samples each step sees, as a pure function of (seed, step).

There is no sampler and no state, so nothing must be saved to resume.

Promises:

- The order does not depend on the number of processes or the micro-batch size, with and without packing.
- Every global batch is full, so a run that is extended continues exactly where it ended.
- If datasets have weights, each gets its share in every epoch. Each goes through its own samples in passes: no
  sample is used twice before all others were used once.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from kit.data.feed.packing import Packs, pack, pack_in_order

# Purposes of random numbers. Each purpose has random streams of its own.
EPOCH, PASS, PACKS, SPLIT, MIX, WINDOW, PARTS, MISMATCH, DRAW = range(9)


def permutation(num: int, seed: int, kind: int, number: int = 0, dataset_id: int = 0) -> np.ndarray:
    """Return a random permutation of 0 to ``num`` - 1, int64 [num], that depends only on the arguments.

    It sorts raw words of the generator, because numpy guarantees these in all its versions, but not its shuffling.

    Args:
        kind: the purpose of the random numbers, such as ``EPOCH``.
        number: distinguishes permutations for one purpose, such as the number of the epoch.
        dataset_id: the index of the dataset, or another number that tells apart permutations.
    """
    return np.argsort(_words(num, seed, kind, number, dataset_id), kind="stable")


def uniform(num: int, seed: int, kind: int, number: int = 0) -> np.ndarray:
    """Return random numbers in [0, 1), float64 [num]. The arguments are those of ``permutation``."""
    return (_words(num, seed, kind, number, 0) >> np.uint64(11)) * 2.0**-53


def _words(num: int, seed: int, kind: int, number: int, dataset_id: int) -> np.ndarray:
    """Return raw words of a generator that is used for these arguments only, uint64 [num]."""
    key = np.array([seed, number], np.uint64)
    counter = np.array([0, 0, dataset_id, kind], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(num)


def packed(
    samples: np.ndarray, lengths: np.ndarray, capacity: int, seed: int, number: int, dataset_id: int = 0
) -> Packs:
    """Pack ``samples`` [N], indices into ``lengths``. The packs come in random order; see ``permutation``."""
    packs = pack(lengths[samples], capacity)
    order = permutation(len(packs), seed, PACKS, number, dataset_id)
    sizes = np.diff(packs.starts)
    slots = np.argsort(np.repeat(np.argsort(order), sizes), kind="stable")  # by the new place of their pack
    return Packs(samples[packs.members[slots]], np.concatenate([[0], np.cumsum(sizes[order])]))


class Order:
    """The endless sequence of a run's items. An item is a sample, or with a ``capacity`` a pack of samples.

    Args:
        lengths: int [N], tokens of each sample.
        dataset_ids: int [N], the index of the dataset of each sample: the samples of a dataset follow one another.
        batch_size: items in a global batch.
        weights: the share of each dataset in an epoch, relative to the others; None: an epoch has each sample once.
        capacity: tokens in a pack; None: no packing.
        shuffle: if not, each epoch has the samples in their own order, and a pack has samples that follow one another.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        dataset_ids: np.ndarray,
        seed: int,
        batch_size: int,
        weights: Sequence[float] | None = None,
        capacity: int | None = None,
        shuffle: bool = True,
    ) -> None:
        assert shuffle or not weights, "shares of datasets are drawn at random"
        self._lengths = lengths
        self._seed = seed
        self._batch_size = batch_size
        self._capacity = capacity
        self._shuffle = shuffle
        # With weights, of each dataset: its first sample, its size, and how many samples it has in an epoch.
        self._firsts: list[int] = []
        self.sizes: list[int] = []
        self.quotas: list[int] = []
        if weights:
            ids = np.arange(len(weights), dtype=dataset_ids.dtype)  # of another type, all would be copied
            self._firsts = np.searchsorted(dataset_ids, ids).tolist()
            self.sizes = np.diff([*self._firsts, len(dataset_ids)]).tolist()
            shares = np.array(weights) / max(weights)
            shares /= shares.sum()
            self.quotas = [max(1, round(quota)) for quota in shares * len(lengths)]
        # With weights, epochs have different samples, which may make different numbers of packs. Otherwise all epochs
        # have the same number of items.
        self._varies = weights is not None and capacity is not None
        self._ends: list[int] = []  # number of items up to the end of each epoch, if epochs vary
        self._counts: dict[int, int] = {}  # of packs, by epoch; under 0 that of every epoch, if epochs do not vary
        self._epochs: dict[int, Packs] = {}

    def _samples(self, epoch: int) -> np.ndarray:
        """The samples of an epoch, in the order of that epoch."""
        if not self._shuffle:
            return np.arange(len(self._lengths))
        if not self.quotas:
            return permutation(len(self._lengths), self._seed, EPOCH, epoch)
        chosen = []
        for dataset_id, (size, quota) in enumerate(zip(self.sizes, self.quotas, strict=True)):
            first = epoch * quota  # of the samples that all epochs take of this dataset
            passes = range(first // size, (first + quota - 1) // size + 1)
            orders = [permutation(size, self._seed, PASS, number, dataset_id) for number in passes]
            start = first % size
            chosen.append(self._firsts[dataset_id] + np.concatenate(orders)[start : start + quota])
        samples = np.concatenate(chosen)
        return samples[permutation(len(samples), self._seed, EPOCH, epoch)]

    def epoch(self, number: int) -> Packs:
        """Return the items of epoch ``number`` in order, each as a pack; without packing a pack has one sample."""
        if number not in self._epochs:
            items = self._make_epoch(number)
            while len(self._epochs) > 1:  # keep two epochs: a step may need both
                self._epochs.pop(min(self._epochs))
            self._epochs[number] = items
        return self._epochs[number]

    def _make_epoch(self, number: int) -> Packs:
        samples = self._samples(number)
        if self._capacity is None:
            # Half the bytes: of a hundred million samples, two epochs are kept.
            small = samples.astype(np.int32) if len(self._lengths) < 2**31 else samples
            return Packs(small, range(len(samples) + 1))
        if not self._shuffle:
            return pack_in_order(self._lengths, self._capacity)
        return packed(samples, self._lengths, self._capacity, self._seed, number)

    def num_items(self, epoch: int) -> int:
        """Return the number of items in ``epoch``."""
        if self._capacity is None:
            return sum(self.quotas) or len(self._lengths)
        number = epoch if self._varies else 0
        if number not in self._counts:
            self._counts[number] = len(self.epoch(number))
        return self._counts[number]

    def total_steps(self, num_epochs: float) -> int:
        """Return the number of steps that see all items of ``num_epochs`` epochs, rounded up."""
        # Computed in decimals: as a binary number, 1.1 epochs of 10 samples are more than 11 samples.
        num_whole, rest = divmod(Fraction(str(num_epochs)), 1)
        num_items = Fraction(sum(self.num_items(epoch) for epoch in range(num_whole)))
        if rest:
            num_items += rest * self.num_items(num_whole)
        return math.ceil(num_items / self._batch_size)

    def batch(self, step: int) -> list[np.ndarray]:
        """Return the global batch of ``step``, counted from 0: for each item the indices of its samples, int64.

        The batch of step s has the items s * batch_size to (s + 1) * batch_size - 1 of all epochs in a row. So a batch
        may contain the end of one epoch and the beginning of the next, even in the last step of a run: the length of a
        run changes none of its batches.
        """
        slot = step * self._batch_size
        end = slot + self._batch_size
        items: list[np.ndarray] = []
        while slot < end:  # once, but for a batch in which an epoch ends
            epoch, position = self._locate(slot)
            packs = self.epoch(epoch)
            starts = np.asarray(packs.starts[position : position + end - slot + 1]).tolist()
            members = packs.members[starts[0] : starts[-1]].astype(np.int64, copy=False)
            items += [members[start - starts[0] : next_start - starts[0]] for start, next_start in pairwise(starts)]
            slot += len(starts) - 1
        return items

    def epochs_after(self, num_steps: int) -> float:
        """Return how many epochs, with fractions, the first ``num_steps`` steps see."""
        epoch, position = self._locate(num_steps * self._batch_size)
        return epoch + position / self.num_items(epoch)

    def whole_epochs_after(self, num_steps: int) -> int:
        """Return how many epochs the first ``num_steps`` steps complete.

        Unlike ``epochs_after`` it changes nothing for a step whose batch was made, so any thread may call it then.
        """
        return self._locate(num_steps * self._batch_size)[0]

    def _locate(self, slot: int) -> tuple[int, int]:
        """The epoch of item number ``slot`` of the run, and its position in that epoch."""
        if not self._varies:
            return divmod(slot, self.num_items(0))
        while not self._ends or self._ends[-1] <= slot:
            last_end = self._ends[-1] if self._ends else 0
            self._ends.append(last_end + self.num_items(len(self._ends)))
        epoch = int(np.searchsorted(self._ends, slot, side="right"))
        start = self._ends[epoch - 1] if epoch else 0
        return epoch, slot - start
