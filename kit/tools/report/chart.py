"""Line charts as SVG, which a page shows without a script.

Promises: an axis that is logarithmic or does not begin at 0 says so. A spike stays visible however many points there
are: of the points that are left out, none is a minimum or a maximum.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kit.tools.report.page import escaped

MAX_POINTS = 1000  # of a line
NUM_COLOURS = 8  # of page.css
_FEW_POINTS = 20  # a line with fewer has dots too
_FEWEST_JOINED = 5  # a line with fewer is pale: nobody measured what was between them
_WIDE_SPAN = 3  # of the highest value to the lowest, from which on a fitted axis is logarithmic
_WIDTH, _HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 388, 8, 180  # of the plot


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str
    x: np.ndarray  # [N], ascending
    y: np.ndarray  # [N]
    colour: int = 0
    is_dashed: bool = False

    @property
    def style(self) -> str:
        """The classes of its style."""
        return f"c{self.colour % NUM_COLOURS}{' dashed' if self.is_dashed else ''}"


@dataclass(frozen=True)
class Chart:
    """Lines over the course of a run, or of several."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[float] = ()  # where on the x axis something happened
    is_fitted: bool = False  # the y axis shows the values as large as it can; else it begins at 0
    x_title: str = "step"
    is_x_log: bool = False


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    is_log: bool = False

    def places(self, values: np.ndarray) -> np.ndarray:
        """Where values are on the axis: 0 at its beginning, 1 at its end."""
        if self.is_log:
            return np.log(values / self.low) / math.log(self.high / self.low)
        return (values - self.low) / (self.high - self.low)

    def ticks(self) -> np.ndarray:
        """Three to seven round values."""
        span = self.high - self.low
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1,) if len(powers) > 4 else (1, 2, 5)
            every = max(1, len(powers) // 6)
            values = np.array([factor * 10.0**power for power in powers[::every] for factor in factors])
        else:
            size = 10.0 ** math.floor(math.log10(span / 3))
            size *= next(factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 5)
            values = np.arange(math.ceil(self.low / size), math.floor(self.high / size) + 1) * size
        return values[(values >= self.low) & (values <= self.high)]


def charts_section(charts: Sequence[Chart], notes: str = "") -> str:
    """Return the charts that have a point, with ``notes`` (HTML) above them."""
    drawn = "".join(map(draw, charts))
    return f"<h2>Curves</h2>{notes}<div class=charts>{drawn}</div>" if drawn else ""


def draw(chart: Chart) -> str:
    """Return a chart as an HTML figure; empty if it has no point."""
    lines = [line for line in chart.lines if len(line.x)]
    if not lines:
        return ""
    across = _x_axis(np.concatenate([line.x for line in lines]), chart.is_x_log)
    up = _y_axis(np.concatenate([line.y for line in lines]), chart.is_fitted)
    parts, points = [_grid(across, up, chart.x_title)], []
    for line in lines:
        kept = _thinned(line.y)
        x, y = line.x[kept], line.y[kept]
        places = list(zip(_across(across, x), _up(up, y), strict=True))
        pale = " few" if len(x) < _FEWEST_JOINED else ""
        parts.append(f"<path class='line {line.style}{pale}' d='M{'L'.join(f'{a} {b}' for a, b in places)}'/>")
        if len(x) < _FEW_POINTS:
            parts += [f"<circle class={line.style[:2]} cx={a} cy={b} r=2.5 />" for a, b in places]
        points.append([[float(f"{a:.9g}"), float(f"{b:.6g}")] for a, b in zip(x, y, strict=True)])
    marks = _across(across, np.array(chart.marks, float))
    parts += [f"<path class=mark d='M{x} {_TOP}V{_BOTTOM}'/>" for x in marks]
    keys = "".join(
        f"<span><i class='{line.style}'></i>{escaped(line.label)} <b>{number(line.y[-1])}</b></span>" for line in lines
    )
    note = (
        " <small>(logarithmic)</small>"
        if up.is_log
        else " <small>(not from 0)</small>"
        if up.low > 0 or up.high < 0
        else ""
    )
    described = ". ".join([chart.title, *(f"{line.label}: last {number(line.y[-1])}" for line in lines)])
    return (
        f"<figure data-points='{json.dumps(points, separators=(',', ':'))}'>"
        f"<figcaption>{escaped(chart.title)}{note}</figcaption>"
        f"<div class=keys>{keys}<span class=at data-name='{escaped(chart.x_title)}'></span></div>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='{escaped(described)}'>{''.join(parts)}"
        f"<path class=cursor d=''/></svg></figure>"
    )


def number(value: float) -> str:
    """Return a number in few characters."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e15):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1e3 or value == int(value) else f"{value:.4g}"


def _x_axis(x: np.ndarray, is_log: bool) -> _Axis:
    if is_log:
        return _Axis(float(x.min()) / 1.3, float(x.max()) * 1.3, True)
    return _Axis(0.0, float(x.max()) or 1.0)


def _y_axis(y: np.ndarray, is_fitted: bool) -> _Axis:
    low, high = float(y.min()), float(y.max())
    if is_fitted and low > 0 and high > _WIDE_SPAN * low:
        return _Axis(low / 1.1, high * 1.1, True)
    if not is_fitted:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.05 * (high - low) or abs(high) or 1.0
    return _Axis(low - margin if is_fitted or low < 0 else 0.0, high + margin)


def _across(axis: _Axis, x: np.ndarray) -> list[float]:
    return [round(float(_LEFT + place * (_RIGHT - _LEFT)), 1) for place in axis.places(x)]


def _up(axis: _Axis, y: np.ndarray) -> list[float]:
    return [round(float(_BOTTOM - place * (_BOTTOM - _TOP)), 1) for place in axis.places(y)]


def _grid(across: _Axis, up: _Axis, x_title: str) -> str:
    rows, columns = up.ticks(), across.ticks()
    parts = [f"<text x={_RIGHT} y={_BOTTOM + 28} text-anchor=end>{escaped(x_title)}</text>"]
    for tick, y in zip(rows, _up(up, rows), strict=True):
        parts.append(f"<path class=grid d='M{_LEFT} {y}H{_RIGHT}'/>")
        parts.append(f"<text x={_LEFT - 5} y={y} dy=.35em text-anchor=end>{_short(tick)}</text>")
    for tick, x in zip(columns, _across(across, columns), strict=True):
        parts.append(f"<path class=grid d='M{x} {_BOTTOM}v4'/>")
        parts.append(f"<text x={min(x, _RIGHT - 4)} y={_BOTTOM + 15} text-anchor=middle>{_short(tick)}</text>")
    return "".join(parts)


def _short(value: float) -> str:
    """A number of an axis: ``20k``, ``1e-05``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{float(f'{value:.6g}'):g}"


def _thinned(y: np.ndarray) -> list[int]:
    """The indices of at most ``MAX_POINTS`` points: the ends, and of each stretch the lowest and the highest."""
    if len(y) <= MAX_POINTS:
        return list(range(len(y)))
    kept = {0, len(y) - 1}
    for stretch in np.array_split(np.arange(len(y)), MAX_POINTS // 2 - 1):
        kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    return sorted(kept)
