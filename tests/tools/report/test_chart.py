"""A chart shows the values as they are: no spike is lost, and an axis that is not plain says so."""

import json
import re

import numpy as np
import pytest

from kit.tools.report.chart import MAX_POINTS, Line, draw


def figure(*values, title="loss", **more):
    return draw(title, [Line("a", np.column_stack([np.arange(1.0, len(values) + 1), values]))], **more)


def points(drawn):
    return json.loads(re.search("data-points='([^']*)'", drawn)[1])


def places(drawn):
    path = re.search("<path class='line c0' d='M([^']*)'", drawn)[1]
    return [tuple(map(float, place.split())) for place in path.split("L")]


def test_values_stand_where_the_axes_say():
    drawn = figure(0, 50, 100)
    assert points(drawn) == [[[1, 0], [2, 50], [3, 100]]] and ">100</text>" in drawn and "<small>" not in drawn
    (_, bottom), (_, middle), (_, top) = places(drawn)
    [y] = re.findall(r"<text x=41 y=([\d.]+) dy=.35em text-anchor=end>100</text>", drawn)
    assert top == float(y) and middle == pytest.approx((bottom + top) / 2, abs=0.1) and bottom == 180
    assert "aria-label='loss. a: last 100'" in drawn and "<b>100</b>" in drawn


def test_an_axis_that_is_not_plain_says_so():
    assert "(logarithmic)" in figure(14, 2, 0.1, is_fitted=True)
    assert "(not from 0)" in figure(2.0, 1.8, is_fitted=True)
    assert "<small>" not in figure(14.0, 0.1) + figure(0.0, 14.0, is_fitted=True)


def test_of_a_long_run_no_spike_is_lost():
    values = np.ones(100_000)
    values[77_777], values[3] = 50, -50
    (drawn,) = points(figure(*values))
    assert len(drawn) <= MAX_POINTS and [77778, 50] in drawn and [4, -50] in drawn and drawn[-1][0] == 100_000


def test_whatever_the_values_are_a_chart_is_drawn():
    for values in ([0.0], [3.0, 3.0], [1e-140, 1e140], [-1e140, 1e140]):
        for is_fitted in (False, True):
            assert all(0 <= x <= 400 and 0 <= y <= 210 for x, y in places(figure(*values, is_fitted=is_fitted))), values
    assert draw("none", [Line("a", np.empty((0, 2)))]) == ""
