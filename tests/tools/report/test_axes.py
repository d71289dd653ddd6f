"""Axes have round numbers, few of them, and say where a value lies."""

import pytest

from kit.tools.report.axes import AxisScale, log_ticks, number, short, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 4, [0, 1, 2, 3, 4]), (0, 160, [0, 50, 100, 150]), (0, 0.0015, [0, 0.0005, 0.001, 0.0015]), (3, 3, [3])],
)
def test_ticks_are_round_numbers(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.01, 15, [0.01, 0.1, 1, 10]),
        (0.9, 12, [1, 2, 5, 10]),
        (2, 6, [2, 3, 4, 5, 6]),
        (2.1, 2.4, [2.1, 2.2, 2.3, 2.4]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round_too(low, high, expected):
    assert log_ticks(low, high) == pytest.approx(expected)


def test_many_powers_of_ten_do_not_crowd_the_axis():
    assert 2 <= len(log_ticks(1e-12, 1e12)) <= 6


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (20_000, "20k"), (1.5e6, "1.5M"), (0.25, "0.25"), (0.00015, "1.5e-4"), (2e-5, "2e-5"), (-3e9, "-3B")],
)
def test_numbers_on_an_axis_are_short(value, text):
    assert short(value) == text


def test_values_are_read_as_people_write_them():
    assert (number(12345.6), number(0.021391), number(3.0)) == ("12,346", "0.02139", "3")


def test_equal_ratios_are_equal_distances_on_a_logarithmic_scale():
    scale = AxisScale(0.01, 100.0, is_log=True)
    assert [scale.share(value) for value in (0.01, 1.0, 10.0, 100.0)] == pytest.approx([0, 0.5, 0.75, 1])
    assert AxisScale(-1.0, 3.0, is_log=False).share(0.0) == 0.25
