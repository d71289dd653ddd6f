"""The bars of a histogram stand where their bins are."""

import re

import pytest

from kit.tools.report.bars import HEIGHT, WIDTH, histogram_svg


def test_a_bar_for_each_bin_that_has_values():
    picture = histogram_svg([2, 0, 4], [0.0, 10.0, 20.0, 30.0], "<tokens>", ("max_length", 25.0))
    bars = [tuple(map(float, each)) for each in re.findall(r"class=bar d='M([\d.]+) [\d.]+V([\d.]+)h([\d.]+)", picture)]
    (first, first_top, width), (third, third_top, _) = bars
    assert third - first == pytest.approx(2 * width, abs=0.2) and HEIGHT > first_top > third_top
    assert "max_length" in picture and "&lt;tokens&gt;" in picture


def test_a_limit_beyond_all_values_is_not_drawn():
    assert "class=mark" not in histogram_svg([1], [0.0, 10.0], "tokens", ("max_length", 2048.0))


def test_the_name_of_the_limit_stands_above_all_bars_and_inside_the_picture():
    for limit in (2.0, 29.0):
        picture = histogram_svg([4, 0, 4], [0.0, 10.0, 20.0, 30.0], "tokens", ("max_length", limit))
        ((x, y, anchor),) = re.findall(r"<text x=([\d.]+) y=(\d+) text-anchor=(\w+)>max_length", picture)
        tops = [float(top) for top in re.findall(r"class=bar d='M[\d.]+ [\d.]+V([\d.]+)", picture)]
        assert 10 < int(y) < min(tops) and anchor == ("start" if limit == 2.0 else "end") and float(x) < WIDTH
