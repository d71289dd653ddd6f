"""Packs that are full, complete and fair, and ranks that do not wait for each other."""

import numpy as np

from kit.data.feed.packing import balance, pack

CAPACITY = 512


def log_normal(count, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(np.log(60), 0.8, count), 1, CAPACITY).astype(np.int64)


def packs_of(packs):
    return [members.tolist() for members in np.split(packs.members, packs.starts[1:-1])] if len(packs) else []


def test_every_sample_is_in_one_pack_and_a_pack_is_not_above_its_capacity():
    for lengths in (
        log_normal(3000),
        np.full(9, CAPACITY),
        np.array([], np.int64),
    ):
        packs = pack(lengths, CAPACITY)
        assert sorted(packs.members.tolist()) == list(range(len(lengths)))
        assert all(0 < lengths[members].sum() <= CAPACITY for members in packs_of(packs))


def test_packs_are_full():
    lengths = log_normal(3000)
    assert len(pack(lengths, CAPACITY)) * CAPACITY < 1.01 * lengths.sum()
    assert packs_of(pack([5, 4, 3, 2], 10)) == [[0, 1], [2, 3]]


def waiting(costs, dealt):
    """What a step takes on top of what it would with equal shares, as a share. Places without a pack cost nothing."""
    per_rank = np.where(dealt >= 0, np.append(costs, 0)[dealt], 0).sum(axis=2)
    return per_rank.max(axis=1).sum() / per_rank.mean(axis=1).sum() - 1


def test_each_pack_is_dealt_once():
    for ranks, batch, count in [(1, 4, 3), (3, 5, 46), (4, 1, 1)]:
        dealt = balance(np.random.default_rng(count).integers(1, 1000, count), ranks, batch)
        assert dealt.shape == (-(-count // (ranks * batch)), ranks, batch)
        assert sorted(dealt[dealt >= 0].tolist()) == list(range(count)) and (dealt[:-1] >= 0).all()


def test_ranks_wait_less_than_with_packs_dealt_as_they_come():
    lengths = log_normal(4000)
    packs = pack(lengths, CAPACITY)
    costs = np.add.reduceat(lengths[packs.members] ** 2, packs.starts[:-1])
    costs = np.random.default_rng(0).permutation(costs)[:256]
    assert waiting(costs, balance(costs, 8, 4)) < 0.03 < 0.3 < waiting(costs, np.arange(256).reshape(-1, 8, 4))
