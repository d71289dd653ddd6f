"""Pack samples, by their lengths, into packs of one capacity; deal packs to ranks and micro-steps. Pure numpy.

Promises:

- Every sample is in exactly one pack, no pack exceeds the capacity, and no sample is cut.
- The same lengths in the same order give the same packs. Samples of equal length are used in the order given, so a
  caller that permutes the samples by (seed, epoch) gets other combinations in every epoch.
- Time and memory are linear in the number of samples.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Packs:
    """Pack p holds the samples ``members[starts[p]:starts[p + 1]]``.

    ``pack`` puts the packs with the longest samples first: shuffle the packs before training on them.
    """

    members: Any  # [N], indices of samples: an array of integers, or what gives one for a slice
    starts: NDArray[np.int64] | range  # [P + 1]; a range, which takes no memory, if each pack has one sample

    def __len__(self) -> int:
        return len(self.starts) - 1

    def items(self) -> list[np.ndarray]:
        """Return the samples of each pack."""
        return [self.members[start:end] for start, end in pairwise(self.starts)]


def pack(lengths: ArrayLike, capacity: int) -> Packs:
    """Put samples of ``lengths`` [N] tokens into few packs of at most ``capacity`` tokens.

    The method is first-fit decreasing: fill one pack after another with the longest sample that still fits.

    Raises:
        ValueError: a length is not in [1, capacity].
    """
    lengths = np.asarray(lengths)
    if lengths.size == 0:
        return Packs(np.empty(0, np.int64), np.zeros(1, np.int64))
    if lengths.min() < 1 or lengths.max() > capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} tokens; expected 1 to {capacity}")
    patterns = list(_patterns(np.bincount(lengths).tolist(), capacity))
    slots = np.concatenate([np.tile(pattern, count) for pattern, count in patterns])  # [N], the length each slot takes
    sizes = np.repeat([len(pattern) for pattern, _ in patterns], [count for _, count in patterns])  # [P]
    members = np.empty(len(lengths), np.int64)
    # Both sides are sorted by length, stably. So the k-th sample of a length gets the k-th slot for that length.
    members[np.argsort(slots, kind="stable")] = np.argsort(lengths, kind="stable")
    return Packs(members, np.concatenate([[0], np.cumsum(sizes)]))


def pack_in_order(lengths: ArrayLike, capacity: int) -> Packs:
    """Put samples of ``lengths`` [N] tokens into packs in their order: a pack ends where the next sample does not fit.

    Needs more packs than ``pack``. No length may be above ``capacity``.
    """
    ends = np.cumsum(lengths, dtype=np.int64)  # [N], tokens up to the end of each sample
    start = 0
    starts = [start]
    while start < len(ends):
        num_before = ends[start - 1] if start else 0  # tokens before the pack
        next_start = int(np.searchsorted(ends, num_before + capacity, side="right"))
        assert next_start > start, "a sample is longer than a pack"
        start = next_start
        starts.append(start)
    return Packs(np.arange(len(ends)), np.array(starts))


def _patterns(counts: list[int], capacity: int) -> Iterator[tuple[list[int], int]]:
    """Yield patterns until all samples are used: the lengths in a pack, and how many packs have these lengths.

    A set of lengths is stored as the bits of one integer, so the longest that fits is found without a search. A
    pattern is repeated until one of its lengths runs out, so the work is per pattern, not per sample.

    Args:
        counts: ``counts[length]`` is the number of samples of that length.
    """
    left = Counter({length: count for length, count in enumerate(counts) if count})
    bits = sum(1 << length for length in left)  # bit l is set: a sample of length l is left

    def take(length: int, count: int) -> None:
        nonlocal bits
        left[length] -= count
        if not left[length]:
            bits ^= 1 << length

    while bits:
        pattern: Counter[int] = Counter()
        space = capacity
        while fitting := bits & ((2 << space) - 1):  # the lengths up to the space that is left
            length = fitting.bit_length() - 1
            pattern[length] += 1
            space -= length
            take(length, 1)
        num_repeats = min(left[length] // times for length, times in pattern.items())
        for length, times in pattern.items():
            if num_repeats:
                take(length, times * num_repeats)
        yield list(pattern.elements()), num_repeats + 1


def balance(costs: ArrayLike, num_ranks: int, micro_batch_size: int) -> NDArray[np.int64]:
    """Deal the packs of one global batch so that in each micro-step the work of all ranks is about equal.

    Packs of similar cost are in the same micro-step, the most expensive first, so that a lack of memory shows in the
    first micro-step. Within a micro-step each pack goes to the rank with the lowest cost so far that has room (longest
    processing time first: Graham, Bounds on Multiprocessing Timing Anomalies, 1969).

    Args:
        costs: [N], in any unit; for attention, the sum of the squared lengths of a pack's samples.

    Returns:
        Indices into ``costs``, each once: [num_micro_steps, num_ranks, micro_batch_size]. Missing packs are -1. They
        are only in the last micro-step, after the indices; a rank has only -1 if there are fewer packs than ranks.
    """
    order = np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable")
    slots_per_step = num_ranks * micro_batch_size
    num_steps = math.ceil(len(order) / slots_per_step)
    dealt = np.full((num_steps, num_ranks, micro_batch_size), -1, dtype=np.int64)
    cost_of = np.asarray(costs).tolist()
    for step, start in enumerate(range(0, len(order), slots_per_step)):
        # A heap of (cost so far, packs so far, rank): the ranks with room.
        ranks = [(0, 0, rank) for rank in range(num_ranks)]
        for index in order[start : start + slots_per_step].tolist():
            cost, count, rank = heapq.heappop(ranks)
            dealt[step, rank, count] = index
            if count + 1 < micro_batch_size:
                heapq.heappush(ranks, (cost + cost_of[index], count + 1, rank))
    return dealt
