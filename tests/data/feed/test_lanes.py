"""A stream is cut into sub-streams that lanes can share, and none of them has much more to read than another."""

import pytest

from kit.data.feed.lanes import num_sub_streams


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
