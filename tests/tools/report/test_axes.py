"""Axes have round numbers, few of them, and say where a value lies."""

import numpy as np
import pytest

from kit.tools.report.axes import AxisScale, fitted_range, full_range, log_ticks, number, short, ticks


def test_ticks_are_round_numbers():
    for low, high, expected in [
        (0, 4, [0, 1, 2, 3, 4]),
        (0, 160, [0, 50, 100, 150]),
        (0, 0.0015, [0, 0.0005, 0.001, 0.0015]),
        (3, 3, [3]),
    ]:
        assert ticks(low, high) == pytest.approx(expected), (low, high, expected)


def test_ticks_of_a_logarithmic_axis_are_round_too():
    cases = [
        (0.01, 15, [0.01, 0.1, 1, 10]),
        (0.9, 12, [1, 2, 5, 10]),
        (2, 6, [2, 3, 4, 5, 6]),
        (2.1, 2.4, [2.1, 2.2, 2.3, 2.4]),
    ]
    for low, high, expected in cases:
        assert log_ticks(low, high) == pytest.approx(expected), (low, high, expected)


def test_many_powers_of_ten_do_not_crowd_the_axis():
    assert 2 <= len(log_ticks(1e-12, 1e12)) <= 6


def test_numbers_on_an_axis_are_short():
    for value, text in [
        (0, "0"),
        (20_000, "20k"),
        (1.5e6, "1.5M"),
        (0.25, "0.25"),
        (0.00015, "1.5e-4"),
        (2e-5, "2e-5"),
        (-3e9, "-3B"),
    ]:
        assert short(value) == text, (value, text)


def test_values_are_read_as_people_write_them():
    assert (number(12345.6), number(0.021391), number(3.0)) == ("12,346", "0.02139", "3")


def test_equal_ratios_are_equal_distances_on_a_logarithmic_scale():
    scale = AxisScale(0.01, 100.0, is_log=True)
    assert [scale.share(value) for value in (0.01, 1.0, 10.0, 100.0)] == pytest.approx([0, 0.5, 0.75, 1])
    assert AxisScale(-1.0, 3.0, is_log=False).share(0.0) == 0.25


def falling(num=200, start=10.0, end=2.0):
    """A loss that falls in its first twentieth, and slowly then."""
    steps = np.arange(num)
    return end + 0.2 * (1 - steps / num) + (start - end) * np.exp(-steps / (num / 50))


def test_the_first_steps_do_not_squeeze_the_others():
    values = falling()
    low, high = fitted_range([values[20:]], values)
    assert 1.9 < low < 2.0 and 2.1 < high < 2.4  # the first is 10
    assert full_range(values)[0] == 0 and full_range(values)[1] > 10


def test_a_value_that_lies_near_is_not_cut_off_and_one_that_lies_far_does_not_set_the_axis():
    steady = np.linspace(2.0, 3.0, 100)
    for value, is_inside in ((3.4, True), (9.0, False), (1.6, True), (-9.0, False)):
        values = np.append(steady, value)
        low, high = fitted_range([values], values)
        assert (low <= value <= high) is is_inside and low < 2.0 and 3.0 < high < 4.0


def test_of_few_values_each_counts():
    assert fitted_range([np.array([2.0])], np.array([14.0, 2.0]))[1] > 14


def test_a_fitted_axis_begins_at_0_if_that_is_near():
    assert fitted_range([np.linspace(0.1, 5, 100)], np.linspace(0.1, 5, 100))[0] == 0
    assert fitted_range([np.linspace(4, 5, 100)], np.linspace(4, 5, 100))[0] > 3.5


def test_noise_does_not_fill_a_fitted_axis():
    values = 5 + np.linspace(-1e-4, 1e-4, 100)
    low, high = fitted_range([values], values)
    assert high - low > 0.09 and low < 5 < high


def test_a_limit_is_shown_wherever_it_lies():
    values = np.linspace(4, 5, 100)
    assert fitted_range([values], values, [1.0])[0] <= 1.0
