"""A stream is cut into sub-streams that lanes can share, and none of them has much more to read than another."""

import numpy as np
import pytest

from kit.data.feed.lanes import UNEVEN, num_sub_streams


@pytest.mark.parametrize(
    ("sizes", "num_lanes", "expected"),
    [
        ([10] * 8, 8, 8),
        ([10] * 8, 4, 4),
        ([10] * 6, 8, 2),  # four would have two files, two files, one file and one file
        ([10] * 3, 8, 1),
        ([None] * 3, 9, 3),  # of unknown size, as on the hub
        ([1000, 10], 8, 1),  # one of two ranks would wait for the other
        ([], 8, 1),
    ],
)
def test_there_are_as_many_sub_streams_as_share_lanes_and_files_evenly(sizes, num_lanes, expected):
    assert num_sub_streams(sizes, num_lanes) == expected


def test_no_sub_stream_has_much_more_to_read_than_another():
    sizes = [7, 9, 8, 11, 10, 7, 9, 8]
    num = num_sub_streams(sizes, 8)
    shares = [sum(sizes[i::num]) for i in range(num)]
    assert 8 % num == 0 and max(shares) <= UNEVEN * min(shares)


@pytest.mark.parametrize("num_lanes", [1, 12, 30, 97])
def test_the_number_of_sub_streams_is_the_largest_of_all_that_divide_evenly(num_lanes):
    rng = np.random.default_rng(0)
    for num_files in range(1, 40):
        sizes = rng.integers(90, 110, num_files).tolist()
        fitting = [1]
        for num in range(2, min(num_files, num_lanes) + 1):
            shares = [sum(sizes[i::num]) for i in range(num)]
            if num_lanes % num == 0 and max(shares) <= UNEVEN * min(shares):
                fitting.append(num)
        assert num_sub_streams(sizes, num_lanes) == fitting[-1]


def test_sizes_are_added_up_only_for_numbers_that_divide_the_lanes():
    """For every number it would take a quarter of a minute at 10,000 files."""

    class Size(int):
        num_additions = 0

        def __radd__(self, other):
            Size.num_additions += 1
            return int(self) + other

    sizes = [Size(10**i % 7) for i in range(300)]
    num_sub_streams(sizes, 300)
    assert 0 < Size.num_additions <= 18 * 300  # 300 has 18 divisors
