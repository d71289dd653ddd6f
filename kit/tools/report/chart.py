"""Charts as SVG that a page shows without a script: each holds all its axes, and CSS shows the one that is chosen.

Promises:

- A spike stays visible however many points there are: of the points that are left out, none is a minimum or a maximum.
- The values that a reader points at are those of the metrics, not of the picture.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from kit.tools.report.axes import AxisScale, number, short, ticks
from kit.tools.report.metrics import Columns
from kit.tools.report.page import escaped

Axis = Literal["step", "tokens", "time"]
KEYS: dict[Axis, str] = {"step": "step", "tokens": "tokens_seen", "time": "seconds"}  # of the metrics
MAX_POINTS = 1000  # of a line
_FEW_POINTS = 20  # a line with fewer has dots too
NUM_COLOURS = 8  # of page.css; further lines are dashed
WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 30  # margins
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
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
    at: Mapping[Axis, np.ndarray]  # [N] for each axis that the rows know
    values: np.ndarray  # [N]
    colour: int = 0

    @cached_property
    def means(self) -> list[tuple[int, float]]:
        """The mean of each stretch, with the index of its middle; empty if no point is left out."""
        of = stretches(len(self.values))
        return [(each[len(each) // 2], float(self.values[each.start : each.stop].mean())) for each in of]


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


def series(label: str, rows: Columns, key: str, scale: float = 1.0, colour: int = 0) -> Series:
    """Take the line of one key from rows of metrics.

    Args:
        scale: factor for all values.
        colour: number of the line's colour.
    """
    values = rows.column(key)
    found = ~np.isnan(values)
    at = {axis: rows.column(name)[found] for axis, name in KEYS.items()}
    known = {axis: positions for axis, positions in at.items() if not np.isnan(positions).any()}
    return Series(label, known, values[found] * scale, colour)


def draw(charts: Sequence[Chart]) -> str:
    """Return the HTML of the charts that have a point. All have the same extent on each axis."""
    charts = [chart for chart in charts if any(len(line.values) for line in chart.series)]
    ends = extents(charts)
    lines = [line for chart in charts for line in chart.series]
    # Marks are given by their steps. The line with the most points says best where these are on the other axes.
    densest = max(lines, key=lambda line: len(line.values), default=None)
    return "".join(_figure(chart, ends, densest) for chart in charts if densest)


def extents(charts: Sequence[Chart]) -> dict[Axis, float]:
    """Return the end of each axis that all lines of all charts know; each begins at 0."""
    lines = [line for chart in charts for line in chart.series if len(line.values)]
    known = [axis for axis in KEYS if all(axis in line.at for line in lines)]
    return {axis: max([0.0, *(float(line.at[axis].max()) for line in lines)]) or 1.0 for axis in known}


def stretches(num: int, most: int = MAX_POINTS) -> list[range]:
    """Divide ``num`` points into stretches so that two of each are at most ``most``; none if all can be drawn."""
    count = most // 2 - 1
    return [] if num <= most else [range(i * num // count, (i + 1) * num // count) for i in range(count)]


def thinned(values: np.ndarray, most: int = MAX_POINTS) -> list[int]:
    """Return the indices of at most ``most`` points to draw: of each stretch the lowest and the highest, in order."""
    kept = {0, len(values) - 1}
    for stretch in stretches(len(values), most):
        part = values[stretch.start : stretch.stop]
        kept |= {stretch.start + int(part.argmin()), stretch.start + int(part.argmax())}
    return sorted(kept) if len(values) > most else list(range(len(values)))


def _scales(chart: Chart) -> dict[str, AxisScale]:
    """The linear scale, from 0 so that small noise does not fill the chart; and the logarithmic one if values allow."""
    values = np.concatenate([*(line.values for line in chart.series), [value for _, value in chart.levels]])
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    scales = {"lin": AxisScale(low, high + 0.05 * (high - low) if high > low else low + 1.0, False)}
    positive = values[values > 0]
    if len(positive):
        low, high = float(positive.min()), float(positive.max())
        margin = (high / low) ** 0.05 if high > low else 1.5
        scales["log"] = AxisScale(low / margin, high * margin, True)
    return scales


def _figure(chart: Chart, ends: Mapping[Axis, float], densest: Series) -> str:
    scales = _scales(chart)
    lines = [(line, thinned(line.values)) for line in chart.series if len(line.values)]
    parts = [f"<g class=y-{name}>{_grid(scale)}</g>" for name, scale in scales.items()]
    for axis, end in ends.items():
        marks = "".join(_mark(mark, densest, axis, end) for mark in chart.marks)
        parts.append(f"<g class=x-{axis}>{_x_axis(axis, end)}{marks}</g>")
    for axis, end in ends.items():
        for name, scale in scales.items():
            drawn = "".join(_line(line, kept, axis, end, scale) for line, kept in lines)
            parts.append(f"<g class='x-{axis} y-{name}'>{drawn}</g>")
    parts += [f"<g class=y-{name}>{_levels(chart, scale)}</g>" for name, scale in scales.items()]
    last = [(line.label, number(line.values[-1]), line.colour % NUM_COLOURS) for line, _ in lines]
    keys = "".join(
        f"<span class=key><i class=c{c}></i>{escaped(label)} <b>{value}</b></span>" for label, value, c in last
    )
    toggle = "<label class=screen><input type=checkbox class=log>log</label>" if "log" in scales else ""
    described = escaped(f"{chart.title}, last: " + ", ".join(f"{label} {value}" for label, value, _ in last))
    return (
        f"<figure data-points='{escaped(json.dumps(_points(lines, ends, scales), separators=(',', ':')))}'>"
        f"<figcaption><span class=title>{escaped(chart.title)}</span>{toggle}</figcaption>"
        f"<div class=keys>{keys}<span class=at></span></div>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label='{described}'>{''.join(parts)}</svg></figure>"
    )


def _grid(scale: AxisScale) -> str:
    parts = []
    for tick in scale.ticks():
        y = _y(tick, scale)
        parts.append(f"<path class=grid d='M{LEFT} {y}h{_PLOT_WIDTH}'/>")
        parts.append(f"<text x={LEFT - 5} y={round(y + 4, 1)} text-anchor=end>{short(tick)}</text>")
    return "".join(parts)


def _levels(chart: Chart, scale: AxisScale) -> str:
    parts = []
    for text, value in chart.levels:
        if not scale.is_log or value > 0:
            y = _y(value, scale)
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


def _mark(mark: Mark, densest: Series, axis: Axis, end: float) -> str:
    num_before = int(np.searchsorted(densest.at["step"], mark.step, side="right"))
    x = _x(mark.step if axis == "step" else densest.at[axis][num_before - 1] if num_before else 0.0, end)
    return f"<path class=mark d='M{x} {TOP}v{_PLOT_HEIGHT}'><title>{escaped(mark.text)}</title></path>"


def _line(line: Series, kept: list[int], axis: Axis, end: float, scale: AxisScale) -> str:
    """A line; where points are left out, a pale band between the lowest and the highest, and the line of the means."""
    at, means = line.at[axis], line.means
    points = [(at[i], line.values[i]) for i in kept]
    colour = f"c{line.colour % NUM_COLOURS}{' dashed' if line.colour >= NUM_COLOURS else ''}"
    drawn = [(f"line {colour}{' band' if means else ''}", points), (f"line {colour}", [(at[i], v) for i, v in means])]
    parts = []
    for style, pairs in drawn:
        shown = [(_x(x, end), _y(value, scale)) for x, value in pairs if not scale.is_log or value > 0]
        if shown:
            parts.append(f"<path class='{style}' d='M{'L'.join(f'{x} {y}' for x, y in shown)}'/>")
        if len(shown) < _FEW_POINTS:
            parts += [f"<circle class='{colour}' cx={x} cy={y} r=2.5 />" for x, y in shown]
    return "".join(parts)


def _x(value: float, end: float) -> float:
    return round(float(LEFT + _PLOT_WIDTH * value / end), 1)


def _y(value: float, scale: AxisScale) -> float:
    return round(float(TOP + _PLOT_HEIGHT * (1 - scale.share(value))), 1)


def _points(
    lines: list[tuple[Series, list[int]]], ends: Mapping[Axis, float], scales: Mapping[str, AxisScale]
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
