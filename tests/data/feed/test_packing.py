"""Packs that are full, complete and fair, and ranks that do not wait for each other."""

import numpy as np

from kit.data.feed.packing import balance, pack

CAPACITY = 512


def log_normal(count, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(np.log(60), 0.8, count), 1, CAPACITY).astype(np.int64)


def packs_of(packs):
    return [members.tolist() for members in np.split(packs.members, packs.starts[1:-1])] if len(packs) else []


def first_fit_decreasing(lengths, capacity):
    """The textbook's: the number of packs."""
    space = []
    for length in sorted(lengths, reverse=True):
        for i, left in enumerate(space):
            if length <= left:
                space[i] -= length
                break
        else:
            space.append(capacity - length)
    return len(space)


def test_every_sample_is_in_one_pack_and_packs_are_no_more_than_first_fit_decreasing_makes():
    for lengths in (
        log_normal(3000),
        np.clip(np.random.default_rng(0).lognormal(np.log(47), 0.35, 3000), 17, 200).astype(np.int64),  # none short
        np.random.default_rng(1).integers(1, CAPACITY + 1, 1000),
        np.random.default_rng(2).integers(CAPACITY // 5, CAPACITY // 2, 1000),
        np.array([200, 156] * 50),
        np.full(9, CAPACITY),
        np.ones(2 * CAPACITY + 1, np.int64),
        np.array([], np.int64),
    ):
        packs = pack(lengths, CAPACITY)
        assert sorted(packs.members.tolist()) == list(range(len(lengths)))
        assert all(0 < lengths[members].sum() <= CAPACITY for members in packs_of(packs))
        assert len(packs) <= first_fit_decreasing(lengths.tolist(), CAPACITY)


def waiting(costs, dealt):
    """What a step takes on top of what it would with equal shares, as a share. Places without a pack cost nothing."""
    per_rank = np.where(dealt >= 0, np.append(costs, 0)[dealt], 0).sum(axis=2)
    return per_rank.max(axis=1).sum() / per_rank.mean(axis=1).sum() - 1


def test_each_pack_is_dealt_once():
    for ranks, batch, count in [(1, 4, 3), (4, 1, 12), (3, 5, 46), (3, 5, 44), (4, 1, 1)]:
        dealt = balance(np.random.default_rng(count).integers(1, 1000, count), ranks, batch)
        assert dealt.shape == (-(-count // (ranks * batch)), ranks, batch)
        assert sorted(dealt[dealt >= 0].tolist()) == list(range(count)) and (dealt[:-1] >= 0).all()


def test_ranks_wait_less_than_with_packs_dealt_as_they_come():
    lengths = log_normal(4000)
    packs = pack(lengths, CAPACITY)
    costs = np.add.reduceat(lengths[packs.members] ** 2, packs.starts[:-1])
    costs = np.random.default_rng(0).permutation(costs)[:256]
    assert waiting(costs, balance(costs, 8, 4)) < 0.03 < 0.3 < waiting(costs, np.arange(256).reshape(-1, 8, 4))
