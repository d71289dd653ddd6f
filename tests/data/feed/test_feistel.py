"""A permutation without memory shuffles as one by sorting does, and gives the same values for ever."""

import tracemalloc

import numpy as np
import pytest

from kit.data.feed.feistel import ROUNDS, Feistel


def made(num, seed=0):
    return Feistel(num, np.random.Generator(np.random.Philox(seed)).integers(0, 2**64, ROUNDS, np.uint64))


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 17, 255, 256, 257, 1000, 65_537, 100_003])
def test_each_number_comes_once(num):
    values = made(num)(np.arange(num))
    assert values.dtype == np.int64 and np.array_equal(np.sort(values), np.arange(num))


def test_any_part_is_that_of_the_whole():
    whole = made(1000)(np.arange(1000))
    assert np.array_equal(made(1000)(np.arange(700, 750)), whole[700:750])


def test_the_values_are_those_of_every_version():
    keys = np.arange(ROUNDS, dtype=np.uint64)
    assert Feistel(10, keys)(np.arange(10)).tolist() == [1, 7, 8, 2, 4, 9, 6, 3, 0, 5]
    assert Feistel(10**9, keys)(np.array([0, 1, 10**9 - 1])).tolist() == [523000256, 400191411, 555732838]


def test_a_billion_numbers_take_no_memory():
    tracemalloc.start()
    made(10**9)(np.arange(1024))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_each_number_is_as_likely_at_each_position_and_beside_each_other():
    """Chi-squared over 10,000 keys, of the number at a position and of the difference between two neighbours."""
    num, keys = 20, 10_000
    drawn = np.array([made(num, seed)(np.arange(num)) for seed in range(keys)])  # [keys, num]
    for position in range(0, num, 5):
        counts = np.bincount(drawn[:, position], minlength=num)
        assert ((counts - keys / num) ** 2 / (keys / num)).sum() < 50  # 19 degrees of freedom: p = 1.3e-4
    steps = np.bincount((drawn[:, 8] - drawn[:, 7]) % num, minlength=num)[1:]  # never 0
    assert ((steps - keys / (num - 1)) ** 2 / (keys / (num - 1))).sum() < 50


def test_two_epochs_and_neighbours_of_a_large_one_have_nothing_in_common():
    num = 100_003
    first, second = made(num, 1)(np.arange(num)), made(num, 2)(np.arange(num))
    limit = 4 / np.sqrt(num)  # four standard deviations of a correlation of independent numbers
    assert abs(np.corrcoef(first, second)[0, 1]) < limit
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < limit
    assert abs(np.corrcoef(first, np.arange(num))[0, 1]) < limit
