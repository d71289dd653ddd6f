"""Lengths to packs of one capacity, and a global batch of packs to ranks and micro-steps. Pure numpy.

Promises:

- Every sample is in exactly one pack, no pack is longer than its capacity, nothing is cut.
- The same lengths in the same order give the same packs. Samples of equal length are taken in the order given: a
  caller that permutes the samples by (seed, epoch) gets other company for them in every epoch.
- Time and memory are linear in the number of samples.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Packs:
    """Pack p holds the samples ``members[starts[p]:starts[p + 1]]``.

    Shapes: members [N], indices into the lengths that were packed; starts [P + 1]. The packs of the longest samples
    lead: shuffle the packs before training on them.
    """

    members: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1


def pack(lengths: ArrayLike, capacity: int) -> Packs:
    """Put samples of ``lengths`` [N] tokens into few packs of at most ``capacity`` tokens.

    First-fit decreasing, which fills one pack after another with the longest sample that still fits, except that a pair
    that fills the pack exactly goes first. Where that makes more packs, as it can with no short samples, plain
    first-fit decreasing.

    Raises:
        ValueError: a length is not an integer in [1, capacity].
    """
    lengths = np.asarray(lengths)
    if lengths.size == 0:
        return Packs(np.empty(0, np.int64), np.zeros(1, np.int64))
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise ValueError(f"lengths: {lengths.dtype} {list(lengths.shape)}; expected integers [N]")
    unfit = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if unfit.size:
        raise ValueError(f"lengths[{unfit[0]}]: {lengths[unfit[0]]} tokens; expected 1 to {capacity}")
    counts = np.bincount(lengths).tolist()
    tries = [list(_patterns(counts, capacity, exact_pairs)) for exact_pairs in (True, False)]
    patterns = min(tries, key=lambda patterns: sum(count for _, count in patterns))
    repeats = [count for _, count in patterns]
    slots = np.concatenate([np.tile(pattern, count) for pattern, count in patterns])  # [N], the length each slot takes
    sizes = np.repeat([len(pattern) for pattern, _ in patterns], repeats)  # [P]
    members = np.empty(len(lengths), np.int64)
    # Both sides sorted by length, stably: the k-th sample of a length takes the k-th slot for that length.
    members[np.argsort(slots, kind="stable")] = np.argsort(lengths, kind="stable")
    return Packs(members, np.concatenate([[0], np.cumsum(sizes)]))


def _patterns(counts: list[int], capacity: int, exact_pairs: bool) -> Iterator[tuple[list[int], int]]:
    """The lengths in a pack and how many packs in a row are so composed, until ``counts[length]`` samples are used.

    Sets of lengths are the bits of one integer, so that the longest that fits is found without a search. Whatever
    was chosen for one pack is chosen again until one of its lengths runs out: the work is per pattern, not per sample.
    """
    left = Counter({length: count for length, count in enumerate(counts) if count})
    bits = sum(1 << length for length in left)  # bit l: a sample of length l is left
    mirrored = sum(1 << (capacity - length) for length in left)  # bit capacity - l: the same

    def take(length: int, count: int) -> None:
        nonlocal bits, mirrored
        left[length] -= count
        if not left[length]:
            bits &= ~(1 << length)
            mirrored &= ~(1 << (capacity - length))

    while bits:
        pattern: list[int] = []
        space = capacity
        while fitting := bits & ((2 << space) - 1):
            length = fitting.bit_length() - 1
            if exact_pairs and length < space:
                length = _of_exact_pair(bits & (mirrored >> (capacity - space)), space, left) or length
            pattern.append(length)
            space -= length
            take(length, 1)
        again = min(left[length] // times for length, times in Counter(pattern).items())
        for length in pattern:
            take(length, again)
        yield pattern, again + 1


def _of_exact_pair(halves: int, space: int, left: Counter[int]) -> int:
    """The longer of two lengths that add up to ``space``, the most even pair of all; 0 if there is none.

    An uneven pair would spend the short samples, which are what fills the last gaps. Bit l of ``halves`` is set if
    samples of length l and of length ``space - l`` are left.
    """
    if space % 2 == 0 and left[space // 2] == 1:
        halves &= ~(1 << space // 2)  # one sample is no pair
    longer = halves >> -(-space // 2) << -(-space // 2)
    return (longer & -longer).bit_length() - 1 if longer else 0


def fill_share(packs: Packs, lengths: ArrayLike, capacity: int) -> float:
    """Tokens of samples over tokens of packs padded to ``capacity``; 1 without packs."""
    return float(np.sum(lengths)) / (len(packs) * capacity) if len(packs) else 1.0


def balance(costs: ArrayLike, num_ranks: int, micro_batch_size: int) -> NDArray[np.int64]:
    """Deal the packs of one global batch so that in each micro-step all ranks have about the same to do.

    Packs of similar cost meet in one micro-step, heaviest first, and there each goes to the rank with the least so far
    that has room (longest processing time first, Graham 1969). Ranks that wait for each other wait little, and a run
    that lacks memory finds out at once.

    Args:
        costs: [N], of any unit; for attention the sum over a pack's samples of length squared.

    Returns:
        [num_micro_steps, num_ranks, micro_batch_size], indices into ``costs``, each once; -1 where there is none,
        in the last micro-step only, behind the indices, and for all of a rank only if packs are fewer than ranks.
    """
    order = np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable")
    slots_per_step = num_ranks * micro_batch_size
    dealt = np.full((-(-len(order) // slots_per_step), num_ranks, micro_batch_size), -1, dtype=np.int64)
    weights = np.asarray(costs).tolist()
    for step, start in enumerate(range(0, len(order), slots_per_step)):
        ranks = [(0, 0, rank) for rank in range(num_ranks)]  # (cost, packs, rank) of those with room: a heap
        for index in order[start : start + slots_per_step].tolist():
            cost, count, rank = heapq.heappop(ranks)
            dealt[step, rank, count] = index
            if count + 1 < micro_batch_size:
                heapq.heappush(ranks, (cost + weights[index], count + 1, rank))
    return dealt
