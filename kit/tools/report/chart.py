"""Line charts as SVG, which a page shows without a script.

Promises: an axis that is logarithmic or does not begin at 0 says so. A spike stays visible however many points there
are: of the points that are left out, none is a minimum or a maximum.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kit.tools.report.page import cell, escaped

MAX_POINTS = 1000  # of a line
NUM_COLOURS = 8  # of page.css
_FEW_POINTS = 20  # a line with fewer has dots too
_WIDE_SPAN = 3  # of the highest value to the lowest, from which on a fitted axis is logarithmic
_WIDTH, _HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 388, 8, 180  # of the plot


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str
    points: np.ndarray  # [N, 2], steps, which ascend, with their values
    colour: int = 0
    is_dashed: bool = False


@dataclass(frozen=True)
class _Axis:
    """Values from ``low`` to ``high``, and where these two are in the picture."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def places(self, values: np.ndarray) -> list[float]:
        """Where values are in the picture."""
        if self.is_log:
            share = np.log(values / self.low) / math.log(self.high / self.low)
        else:
            share = (values - self.low) / (self.high - self.low)
        return (self.start + share * (self.end - self.start)).round(1).tolist()

    def ticks(self) -> np.ndarray:
        """Three to seven round values."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1,) if len(powers) > 4 else (1, 2, 5)
            every = max(1, len(powers) // 6)
            values = np.array([factor * 10.0**power for power in powers[::every] for factor in factors])
        else:
            span = self.high - self.low
            size = 10.0 ** math.floor(math.log10(span / 3))
            size *= next(factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 5)
            values = np.arange(math.ceil(self.low / size), math.floor(self.high / size) + 1) * size
        return values[(values >= self.low) & (values <= self.high)]


def draw(title: str, lines: Sequence[Line], marks: Sequence[float] = (), is_fitted: bool = False) -> str:
    """Return a chart as an HTML figure; empty if its lines have no point.

    Args:
        marks: steps at which something happened.
        is_fitted: the y axis shows the values as large as it can; else it begins at 0.
    """
    lines = [line for line in lines if len(line.points)]
    if not lines:
        return ""
    across = _Axis(0.0, max(float(line.points[-1, 0]) for line in lines) or 1.0, _LEFT, _RIGHT)
    up = _y_axis(np.concatenate([line.points[:, 1] for line in lines]), is_fitted)
    parts, points, keys, described = [_grid(across, up)], [], "", title
    for line in lines:
        x, y = line.points[_thinned(line.points[:, 1])].T
        places = list(zip(across.places(x), up.places(y), strict=True))
        colour, last = f"c{line.colour % NUM_COLOURS}", cell(float(y[-1]))
        style = f"{colour} dashed" if line.is_dashed else colour
        parts.append(f"<path class='line {style}' d='M{'L'.join(f'{a} {b}' for a, b in places)}'/>")
        if len(x) < _FEW_POINTS:
            parts += [f"<circle class={colour} cx={a} cy={b} r=2.5 />" for a, b in places]
        points.append([[float(f"{a:.9g}"), float(f"{b:.6g}")] for a, b in zip(x, y, strict=True)])
        keys += f"<span><i class='{style}'></i>{escaped(line.label)} <b>{last}</b></span>"
        described += f". {line.label}: last {last}"
    parts += [f"<path class=mark d='M{x} {_TOP}V{_BOTTOM}'/>" for x in across.places(np.array(marks, float))]
    note = "logarithmic" if up.is_log else "not from 0" if up.low > 0 or up.high < 0 else ""
    return (
        f"<figure data-points='{json.dumps(points, separators=(',', ':'))}'>"
        f"<figcaption>{escaped(title)}{f' <small>({note})</small>' if note else ''}</figcaption>"
        f"<div class=keys>{keys}<span class=at></span></div>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='{escaped(described)}'>{''.join(parts)}"
        f"<path class=cursor d=''/></svg></figure>"
    )


def _y_axis(y: np.ndarray, is_fitted: bool) -> _Axis:
    low, high = float(y.min()), float(y.max())
    if is_fitted and low > 0 and high > _WIDE_SPAN * low:
        return _Axis(low / 1.1, high * 1.1, _BOTTOM, _TOP, True)
    if not is_fitted:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.05 * (high - low) or abs(high) or 1.0
    return _Axis(low - margin if is_fitted or low < 0 else 0.0, high + margin, _BOTTOM, _TOP)


def _grid(across: _Axis, up: _Axis) -> str:
    parts = [f"<text x={_RIGHT} y={_BOTTOM + 28} text-anchor=end>step</text>"]
    for tick, y in zip(up.ticks(), up.places(up.ticks()), strict=True):
        parts.append(f"<path class=grid d='M{_LEFT} {y}H{_RIGHT}'/>")
        parts.append(f"<text x={_LEFT - 5} y={y} dy=.35em text-anchor=end>{tick:g}</text>")
    for tick, x in zip(across.ticks(), across.places(across.ticks()), strict=True):
        parts.append(f"<path class=grid d='M{x} {_BOTTOM}v4'/>")
        parts.append(f"<text x={min(x, _RIGHT - 4)} y={_BOTTOM + 15} text-anchor=middle>{tick:g}</text>")
    return "".join(parts)


def _thinned(y: np.ndarray) -> list[int]:
    """The indices of at most ``MAX_POINTS`` points: the ends, and of each stretch the lowest and the highest."""
    if len(y) <= MAX_POINTS:
        return list(range(len(y)))
    kept = {0, len(y) - 1}
    for stretch in np.array_split(np.arange(len(y)), MAX_POINTS // 2 - 1):
        kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    return sorted(kept)
