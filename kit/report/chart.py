"""Charts as SVG that a page shows without a script: each holds all its axes, and CSS shows the one that is chosen.

Promises:

- A spike stays visible however many points there are: of the points that are left out, none is a minimum or a maximum.
- The values that a reader points at are those of the metrics, not of the picture.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kit.report.page import escaped

Axis = Literal["step", "tokens", "time"]
KEYS: dict[Axis, str] = {"step": "step", "tokens": "tokens_seen", "time": "seconds"}  # of the metrics
MAX_POINTS = 1000  # of a line
NUM_COLOURS = 8  # of page.css; further lines are dashed
WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 30  # margins
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_NUM_TICKS = 5
_UNITS = (
    ("days", 2 * 86400.0, 86400.0),
    ("hours", 2 * 3600.0, 3600.0),
    ("minutes", 120.0, 60.0),
    ("seconds", 0.0, 1.0),
)


@dataclass(frozen=True)
class Series:
    """A line of a chart: its points' positions on each axis, and their values."""

    label: str
    at: Mapping[Axis, Sequence[float]]  # [N] for each axis that the rows know
    values: Sequence[float]  # [N]
    colour: int = 0


@dataclass(frozen=True)
class Mark:
    """A vertical line: something happened after this step."""

    step: int
    text: str


@dataclass(frozen=True)
class Chart:
    """Lines over the course of a run, or of several."""

    title: str
    series: Sequence[Series]
    levels: Sequence[tuple[str, float]] = ()  # horizontal lines: (text, value)
    marks: Sequence[Mark] = field(default_factory=tuple)


def series(label: str, rows: Iterable[Mapping[str, Any]], key: str, scale: float = 1.0, colour: int = 0) -> Series:
    """Take the line of one key from rows of metrics.

    Args:
        scale: factor for all values.
        colour: number of the line's colour.
    """
    found = [row for row in rows if key in row]
    at = {axis: [float(row[name]) for row in found] for axis, name in KEYS.items() if all(name in row for row in found)}
    return Series(label, at, [row[key] * scale for row in found], colour)


def draw(charts: Sequence[Chart]) -> str:
    """Return the HTML of the charts that have a point. All have the same extent on each axis."""
    charts = [chart for chart in charts if any(line.values for line in chart.series)]
    ends = extents(charts)
    return "".join(_figure(chart, ends) for chart in charts)


def extents(charts: Sequence[Chart]) -> dict[Axis, float]:
    """Return the end of each axis that all lines of all charts know; each begins at 0."""
    lines = [line for chart in charts for line in chart.series if line.values]
    known = [axis for axis in KEYS if all(axis in line.at for line in lines)]
    return {axis: max((max(line.at[axis]) for line in lines), default=0.0) or 1.0 for axis in known}


def thinned(values: Sequence[float], most: int = MAX_POINTS) -> list[int]:
    """Return the indices of at most ``most`` points to draw: of each stretch the lowest and the highest, in order."""
    num = len(values)
    if num <= most:
        return list(range(num))
    stretches = max(most // 2 - 1, 1)
    kept = {0, num - 1}
    for i in range(stretches):
        stretch = range(i * num // stretches, (i + 1) * num // stretches)
        kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return sorted(kept)


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
    """Return a number as text for an axis: ``1.5M``, ``20k``, ``0.25``, ``2e-05``."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class _Scale:
    """Maps values to heights in the picture."""

    low: float
    high: float
    is_log: bool

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(TOP + _PLOT_HEIGHT * (1 - (value - low) / (high - low)), 1)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)


def _scales(chart: Chart) -> dict[str, _Scale]:
    """The linear scale, from 0 so that small noise does not fill the chart; and the logarithmic one if values allow."""
    values = [value for line in chart.series for value in line.values] + [value for _, value in chart.levels]
    low, high = min(0.0, *values), max(0.0, *values)
    scales = {"lin": _Scale(low, high + 0.05 * (high - low) if high > low else low + 1.0, False)}
    positive = [value for value in values if value > 0]
    if positive:
        low, high = min(positive), max(positive)
        margin = (high / low) ** 0.05 if high > low else 1.5
        scales["log"] = _Scale(low / margin, high * margin, True)
    return scales


def _figure(chart: Chart, ends: Mapping[Axis, float]) -> str:
    scales = _scales(chart)
    lines = [(line, thinned(line.values)) for line in chart.series if line.values]
    parts = []
    for name, scale in scales.items():
        parts.append(f"<g class=y-{name}>{_grid(chart, scale)}</g>")
    for axis, end in ends.items():
        parts.append(f"<g class=x-{axis}>{_x_axis(axis, end)}{_marks(chart, axis, end)}</g>")
    for axis, end in ends.items():
        for name, scale in scales.items():
            drawn = "".join(_line(line, kept, axis, end, scale) for line, kept in lines)
            parts.append(f"<g class='x-{axis} y-{name}'>{drawn}</g>")
    keys = "".join(
        f"<span class=key><i class=c{line.colour % NUM_COLOURS}></i>{escaped(line.label)} "
        f"<b>{line.values[-1]:.4g}</b></span>"
        for line, _ in lines
    )
    toggle = "<label class=screen><input type=checkbox class=log>log</label>" if "log" in scales else ""
    label = escaped(f"{chart.title}, last: " + ", ".join(f"{line.label} {line.values[-1]:.4g}" for line, _ in lines))
    return (
        f"<figure data-points='{escaped(json.dumps(_points(lines, ends, scales), separators=(',', ':')))}'>"
        f"<figcaption><span class=title>{escaped(chart.title)}</span>{toggle}</figcaption>"
        f"<div class=keys>{keys}<span class=at></span></div>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label='{label}'>{''.join(parts)}</svg></figure>"
    )


def _grid(chart: Chart, scale: _Scale) -> str:
    parts = []
    for tick in scale.ticks():
        y = scale.y(tick)
        parts.append(f"<path class=grid d='M{LEFT} {y}h{_PLOT_WIDTH}'/>")
        parts.append(f"<text x={LEFT - 5} y={round(y + 4, 1)} text-anchor=end>{short(tick)}</text>")
    for text, value in chart.levels:
        if not scale.is_log or value > 0:
            y = scale.y(value)
            parts.append(f"<path class=level d='M{LEFT} {y}h{_PLOT_WIDTH}'/>")
            above = y - 4 if y > TOP + 14 else y + 12
            parts.append(f"<text x={WIDTH - RIGHT} y={round(above, 1)} text-anchor=end>{escaped(text)}</text>")
    return "".join(parts)


def _x_axis(axis: Axis, end: float) -> str:
    unit, _, size = next(each for each in _UNITS if end >= each[1]) if axis == "time" else (axis, 0.0, 1.0)
    parts = [f"<text x={WIDTH - RIGHT} y={HEIGHT - 2} text-anchor=end class=unit>{unit}</text>"]
    for tick in ticks(0.0, end / size):
        x = _x(tick * size, end)
        parts.append(f"<path class=tick d='M{x} {HEIGHT - BOTTOM}v4'/>")
        parts.append(f"<text x={x} y={HEIGHT - BOTTOM + 15} text-anchor=middle>{short(tick)}</text>")
    return "".join(parts)


def _marks(chart: Chart, axis: Axis, end: float) -> str:
    line = max((line for line in chart.series if line.values), key=lambda line: len(line.values))
    parts = []
    for mark in chart.marks:
        # On the other axes a step is where the last point up to it is.
        before = [at for step, at in zip(line.at["step"], line.at[axis], strict=True) if step <= mark.step]
        x = _x(mark.step if axis == "step" else before[-1] if before else 0.0, end)
        parts.append(f"<path class=mark d='M{x} {TOP}v{_PLOT_HEIGHT}'><title>{escaped(mark.text)}</title></path>")
    return "".join(parts)


def _line(line: Series, kept: list[int], axis: Axis, end: float, scale: _Scale) -> str:
    shown = [i for i in kept if not scale.is_log or line.values[i] > 0]
    points = [(_x(line.at[axis][i], end), scale.y(line.values[i])) for i in shown]
    if not points:
        return ""
    style = f"c{line.colour % NUM_COLOURS}{' dashed' if line.colour >= NUM_COLOURS else ''}"
    dots = "".join(f"<circle class={style} cx={x} cy={y} r=2.5 />" for x, y in points) if len(points) < 20 else ""
    return f"<path class='line {style}' d='M{'L'.join(f'{x} {y}' for x, y in points)}'/>{dots}"


def _x(value: float, end: float) -> float:
    return round(LEFT + _PLOT_WIDTH * value / end, 1)


def _points(
    lines: list[tuple[Series, list[int]]], ends: Mapping[Axis, float], scales: Mapping[str, _Scale]
) -> dict[str, Any]:
    """What charts.js needs to show the values under the pointer."""
    return {
        "box": [LEFT, TOP, _PLOT_WIDTH, _PLOT_HEIGHT],
        "ends": ends,
        "scales": {name: [scale.low, scale.high] for name, scale in scales.items()},
        "lines": [
            {
                **{axis: [_digits(line.at[axis][i]) for i in kept] for axis in ends},
                "y": [_digits(line.values[i]) for i in kept],
            }
            for line, kept in lines
        ],
    }


def _digits(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.6g}")
