"""Axes of charts: round numbers on them, numbers as text, and where a value lies. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NUM_TICKS = 5
# Of a fitted axis:
_FEWEST_FOR_QUANTILES = 20  # values of a line
_OUTLIERS = 0.01  # share of the values at each end that do not set it
_REACH = 0.5  # of the range: values that lie less far outside are on the axis too
_NEAR_ZERO = 0.25  # of the upper end: an axis that would begin below this begins at 0
_LEAST_RANGE = 0.02  # of the largest value: less would show noise as if it were a change
_MARGIN = 0.05  # of the range


def ticks(low: float, high: float, most: int = _NUM_TICKS) -> list[float]:
    """Return round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(size for size in (power, 2 * power, 5 * power, 10 * power) if size >= rough * 0.999)
    return [i * size for i in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = _NUM_TICKS) -> list[float]:
    """Return round numbers in [low, high], above 0, for a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p * 1.000001 and f * 10.0**p <= high]
        if len(found) <= most:
            break
    if len(found) > most:
        found = found[:: math.ceil(len(found) / most)]
    return found if len(found) > 1 else [tick for tick in ticks(low, high, most) if tick > 0]


def short(value: float) -> str:
    """Return a number as text for an axis: ``1.5M``, ``20k``, ``0.25``, ``2e-5``."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    if 0 < abs(value) < 0.001:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def number(value: float) -> str:
    """Return a value as text: ``12,345``, ``0.02139``."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


@dataclass(frozen=True)
class AxisScale:
    """A linear or logarithmic axis."""

    low: float
    high: float
    is_log: bool

    def share(self, value: float) -> float:
        """Return where ``value`` lies, from 0 at ``low`` to 1 at ``high``."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return round numbers on the scale."""
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)


def full_range(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of an axis from 0 that shows all ``values``, [N] with N > 0."""
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    return low, high + _MARGIN * (high - low) if high > low else low + 1.0


def fitted_range(settled: Sequence[np.ndarray], values: np.ndarray, shown: Sequence[float] = ()) -> tuple[float, float]:
    """Return the ends of an axis that shows the course of a run well; some values may lie outside.

    Args:
        settled: the values of each line without the first steps, which are often far from all others.
        values: all values. [N], N > 0
        shown: values that do not lie outside in any case.
    """
    if max(map(len, settled)) < _FEWEST_FOR_QUANTILES:
        settled = [values]  # of few values, each counts
    ends = [np.array(shown)] if shown else []
    for each in settled:
        if len(each):
            ends.append(np.quantile(each, (_OUTLIERS, 1 - _OUTLIERS)) if len(each) >= _FEWEST_FOR_QUANTILES else each)
    low, high = float(min(each.min() for each in ends)), float(max(each.max() for each in ends))
    reach = _REACH * (high - low)
    near = values[(values >= low - reach) & (values <= high + reach)]
    low, high = float(near.min(initial=low)), float(near.max(initial=high))
    least = _LEAST_RANGE * max(abs(low), abs(high)) or 1.0
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    margin = _MARGIN * (high - low)
    return 0.0 if 0 <= low <= _NEAR_ZERO * high else low - margin, high + margin
