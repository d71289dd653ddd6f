"""Axes of charts: round numbers on them, numbers as text, and where a value lies. Pure functions."""

import math
from dataclasses import dataclass

_NUM_TICKS = 5


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
