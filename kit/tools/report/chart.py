"""Charts as SVG that a page shows without a script: each holds all its axes, and CSS shows the one that is chosen.

Promises:

- An axis that does not begin at 0 says so; values outside of it are marked at its border, counted and named.
- Points are joined only if they are close enough to say what was between them.
- A spike stays visible however many points there are: of the points that are left out, none is a minimum or a maximum.
- The values that a reader points at are those of the metrics, not of the picture.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from kit.tools.report.axes import AxisScale, fitted_range, full_range, number, short, ticks
from kit.tools.report.metrics import Columns
from kit.tools.report.page import choice, escaped

Axis = Literal["step", "tokens", "time"]
KEYS: dict[Axis, str] = {"step": "step", "tokens": "tokens_seen", "time": "seconds"}  # of the metrics
MAX_POINTS = 1000  # of a line
_FEW_POINTS = 20  # a line with fewer has dots too
_FEWEST_JOINED = 5  # points; a line through fewer would claim to know what was between them
_FIRST_STEPS = 0.1  # of all, that do not set the range of a fitted axis
_SCALE_WORDS = {"fit": "fitted", "zero": "from 0", "log": "log"}
_MOST_TRIANGLES = 8  # of a line, where it lies outside of the axis
_ROWS_OF_VALUES, _LETTER = 2, 6.2  # of the values beside them; width of a letter
_FAR = 5000.0  # units: a browser cannot draw to any coordinate
NUM_COLOURS = 8  # of page.css; further lines are dashed
WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 30  # margins
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_EDGE = 4  # units around the plot in which a dot on its border is still drawn
# An inner SVG cuts off what lies outside of it.
_BOX = (LEFT - _EDGE, TOP - _EDGE, _PLOT_WIDTH + 2 * _EDGE, _PLOT_HEIGHT + 2 * _EDGE)
_PLOT = "class=plot x={} y={} width={} height={} viewBox='{} {} {} {}'".format(*_BOX, *_BOX)
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
    is_fitted: bool = False  # whether the y axis is fitted to the values, until a reader chooses that it begins at 0
    reaches: float = 0.0  # the y axis from 0 ends no lower, as that of a share


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


def curves_section(charts: Sequence[Chart], notes: str = "") -> str:
    """Return the section of a page with the charts that have a point, and the choice of their x axis.

    Args:
        notes: HTML above the charts.
    """
    axes = list(extents(charts))
    control = choice("x", "x axis", axes) if len(axes) > 1 else ""
    controls = f"<div class='controls screen'>{control}</div>" if control else ""
    return f"<section><h2>Curves</h2>{notes}{controls}<div class=charts>{draw(charts)}</div></section>"


def draw(charts: Sequence[Chart]) -> str:
    """Return the HTML of the charts that have a point. All have the same extent on each axis."""
    charts = [chart for chart in charts if any(len(line.values) for line in chart.series)]
    ends = extents(charts)
    lines = [line for chart in charts for line in chart.series]
    # Marks are given by their steps. The line with the most points says best where these are on the other axes.
    densest = max(lines, key=lambda line: len(line.values), default=None)
    return "".join(_figure(chart, i, ends, densest) for i, chart in enumerate(charts) if densest)


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
    """The scales of the y axis that a reader can choose, as many as there are of ``fit``, ``zero`` and ``log``.

    The first is the one that is shown at first.
    """
    levels = [value for _, value in chart.levels]
    values = np.concatenate([*(line.values for line in chart.series), levels])
    scales = {"zero": AxisScale(*full_range(np.append(values, chart.reaches)), False)}
    last = max(float(line.at["step"].max()) for line in chart.series if len(line.values))
    if chart.is_fitted:
        settled = [line.values[line.at["step"] > _FIRST_STEPS * last] for line in chart.series]
        fitted = AxisScale(*fitted_range(settled, values, levels), False)
        if fitted.low or fitted.high < float(values.max()):
            scales = {"fit": fitted} | scales
    positive = values[values > 0]
    if len(positive):
        low, high = float(positive.min()), float(positive.max())
        margin = (high / low) ** 0.05 if high > low else 1.5
        scales["log"] = AxisScale(low / margin, high * margin, True)
    return scales


def _figure(chart: Chart, number_of: int, ends: Mapping[Axis, float], densest: Series) -> str:
    scales = _scales(chart)
    lines = [(line, thinned(line.values)) for line in chart.series if len(line.values)]
    drawn_lines = [line for line, _ in lines]
    parts = [f"<g class=y-{name}>{_grid(scale)}</g>" for name, scale in scales.items()]
    for axis, end in ends.items():
        marks = "".join(_mark(mark, densest, axis, end) for mark in chart.marks)
        parts.append(f"<g class=x-{axis}>{_x_axis(axis, end)}{marks}</g>")
    for axis, end in ends.items():
        for name, scale in scales.items():
            drawn = "".join(_line(line, kept, axis, end, scale) for line, kept in lines)
            points = _single_points(chart, drawn_lines, axis, end, scale)
            parts.append(f"<g class='x-{axis} y-{name}'><svg {_PLOT}>{drawn}</svg>{points}</g>")
    parts += [f"<g class=y-{name}>{_levels(chart, scale)}</g>" for name, scale in scales.items()]
    keys = "".join(
        f"<span class=key><i class='{_colour(line)}'></i>{escaped(line.label)} <b>{number(line.values[-1])}</b></span>"
        for line in drawn_lines
    )
    described = f"{chart.title}. " + " ".join(_described(line) for line, _ in lines)
    names = {name: word for name, word in _SCALE_WORDS.items() if name in scales}
    scale_choice = choice(f"y{number_of}", "y axis", names, next(iter(scales))) if len(names) > 1 else ""
    notes = {name: _note(scale, drawn_lines) for name, scale in scales.items()}
    shown_notes = "".join(f"<p class='note y-{name}'>{text}</p>" for name, text in notes.items() if text)
    return (
        f"<figure data-points='{escaped(json.dumps(_points(lines, ends, scales), separators=(',', ':')))}'>"
        f"<figcaption><span class=title>{escaped(chart.title)}</span>{scale_choice}"
        f"</figcaption><div class=keys>{keys}<span class=at aria-live=polite></span></div>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img tabindex=0 aria-label='{escaped(described)}'>{''.join(parts)}"
        f"</svg>{shown_notes}</figure>"
    )


def _described(line: Series) -> str:
    """A line in words, for who cannot see it."""
    values = line.values
    ends = f"first {number(values[0])}, last {number(values[-1])}" if len(values) > 1 else number(values[0])
    return f"{line.label or 'value'}: {ends}, lowest {number(values.min())}, highest {number(values.max())}."


@dataclass(frozen=True)
class _Outside:
    """The points of a line that lie outside of a scale, on one side: how many, and of each stretch the farthest."""

    num: int
    farthest: list[int]  # indices, the farthest first


def _outside(values: np.ndarray, scale: AxisScale) -> dict[bool, _Outside]:
    """What lies above (True) and below (False) of a scale; a side without any is left out."""
    if scale.is_log:
        return {}
    far = {True: values - scale.high, False: scale.low - values}
    sides = {}
    for is_above, distances in far.items():
        found = np.flatnonzero(distances > 0)
        if len(found):
            parts = np.split(found, np.flatnonzero(np.diff(found) > 1) + 1)
            tops = sorted((int(part[distances[part].argmax()]) for part in parts), key=lambda i: -distances[i])
            sides[is_above] = _Outside(len(found), tops)
    return sides


def _single_points(chart: Chart, lines: list[Series], axis: Axis, end: float, scale: AxisScale) -> str:
    """Triangles at the border where points lie outside, and the values of these and of the points of a short line."""
    taken = [_level_box(text, _y(value, scale)) for text, value in chart.levels if not scale.is_log or value > 0]
    triangles: list[tuple[str, _Box, bool]] = []  # colour, where, whether it points up
    labels: list[tuple[str, float, float, str, bool]] = []  # colour, x, y, text, whether the text is above y
    for line in lines:
        colour, at = f"c{line.colour % NUM_COLOURS}", line.at[axis]
        sides = _outside(line.values, scale)
        for is_above, found in sides.items():
            y = float(TOP if is_above else HEIGHT - BOTTOM)
            for i in found.farthest[:_MOST_TRIANGLES]:
                x = _x(at[i], end)
                box = (x - 4, y - 4, x + 4, y + 4)
                if not any(each[0] == colour and _overlap(box, each[1]) for each in triangles):
                    triangles.append((colour, box, is_above))
                    labels.append((colour, x, y + (4 if is_above else -4), number(line.values[i]), not is_above))
        if len(line.values) < _FEWEST_JOINED:
            for position, value in zip(at, line.values, strict=True):
                if scale.low <= value <= scale.high:
                    y = _y(value, scale)
                    labels.append((colour, _x(position, end), y, number(value), y > TOP + _PLOT_HEIGHT / 2))
    taken += [box for _, box, _ in triangles]
    parts = [
        f"<path class='beyond {colour}' d='M{x0} {y1}h8l-4 -8z'/>"
        if is_above
        else f"<path class='beyond {colour}' d='M{x0} {y0}h8l-4 8z'/>"
        for colour, (x0, y0, _, y1), is_above in triangles
    ]
    for colour, x, y, text, is_over in labels:
        width, to_right = _LETTER * len(text), x < LEFT + _PLOT_WIDTH / 2
        left = x + 6 if to_right else x - 6 - width
        for row in range(_ROWS_OF_VALUES):
            foot = round(y - 5 - 12 * row if is_over else y + 9 + 12 * row, 1)
            box = (left, foot - 10, left + width, foot + 2)
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                at_x, anchor = round(left if to_right else x - 6, 1), "start" if to_right else "end"
                parts.append(f"<text class='value {colour}' x={at_x} y={foot} text-anchor={anchor}>{text}</text>")
                break
    return "".join(parts)


_Box = tuple[float, float, float, float]  # left, top, right, bottom


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _note(scale: AxisScale, lines: list[Series]) -> str:
    """What a reader of the chart could miss on this scale: where it begins, and what it does not show."""
    num_all = sum(len(line.values) for line in lines)
    if scale.is_log:
        num = sum(int((line.values <= 0).sum()) for line in lines)
        return f"Not shown: {num:,} of {num_all:,} values, 0 or less." if num else ""
    texts = [f"The axis begins at {short(float(f'{scale.low:.3g}'))}, not at 0."] if scale.low > 0 else []
    for is_above, words in ((True, ("Above", "up")), (False, ("Below", "down"))):
        found = [(line, sides[is_above]) for line in lines if is_above in (sides := _outside(line.values, scale))]
        if found:
            farthest = [float(line.values[each.farthest[0]]) for line, each in found]
            end = number(max(farthest) if is_above else min(farthest))
            num = sum(each.num for _, each in found)
            texts.append(f"{words[0]} the axis: {num:,} of {num_all:,} values, {words[1]} to {end}.")
    return " ".join(texts)


def _grid(scale: AxisScale) -> str:
    parts = []
    for tick in scale.ticks():
        y = _y(tick, scale)
        parts.append(f"<path class=grid d='M{LEFT} {y}h{_PLOT_WIDTH}'/>")
        parts.append(f"<text x={LEFT - 5} y={y} dy=.35em text-anchor=end>{short(tick)}</text>")
    return "".join(parts)


def _levels(chart: Chart, scale: AxisScale) -> str:
    parts = []
    for text, value in chart.levels:
        if not scale.is_log or value > 0:
            y = _y(value, scale)
            parts.append(f"<path class=level d='M{LEFT} {y}h{_PLOT_WIDTH}'/>")
            foot = round(_level_box(text, y)[3] - 2, 1)
            parts.append(f"<text x={WIDTH - RIGHT} y={foot} text-anchor=end>{escaped(text)}</text>")
    return "".join(parts)


def _level_box(text: str, y: float) -> _Box:
    """Where the text of a horizontal line is: above it if there is room, at the right."""
    foot = y - 4 if y > TOP + 14 else y + 12
    return (WIDTH - RIGHT - _LETTER * len(text), foot - 10, WIDTH - RIGHT, foot + 2)


def _x_axis(axis: Axis, end: float) -> str:
    unit, _, size = next(each for each in _UNITS if end >= each[1]) if axis == "time" else (axis, 0.0, 1.0)
    parts = [f"<text x={WIDTH - RIGHT} y={HEIGHT - BOTTOM + 6} dy=1.9em text-anchor=end class=unit>{unit}</text>"]
    for tick in ticks(0.0, end / size):
        x = _x(tick * size, end)
        parts.append(f"<path class=tick d='M{x} {HEIGHT - BOTTOM}v4'/>")
        middle = round(min(x, WIDTH - _LETTER * len(short(tick)) / 2), 1)  # so that none is cut off
        parts.append(f"<text x={middle} y={HEIGHT - BOTTOM + 6} dy=.8em text-anchor=middle>{short(tick)}</text>")
    return "".join(parts)


def _mark(mark: Mark, densest: Series, axis: Axis, end: float) -> str:
    num_before = int(np.searchsorted(densest.at["step"], mark.step, side="right"))
    x = _x(mark.step if axis == "step" else densest.at[axis][num_before - 1] if num_before else 0.0, end)
    return f"<path class=mark d='M{x} {TOP}v{_PLOT_HEIGHT}'><title>{escaped(mark.text)}</title></path>"


def _line(line: Series, kept: list[int], axis: Axis, end: float, scale: AxisScale) -> str:
    """A line; where points are left out, a pale band between the lowest and the highest, and the line of the means."""
    at, means = line.at[axis], line.means
    points = [(at[i], line.values[i]) for i in kept]
    colour = _colour(line)
    drawn = [(f"line {colour}{' band' if means else ''}", points), (f"line {colour}", [(at[i], v) for i, v in means])]
    parts = []
    for style, pairs in drawn:
        shown = [(_x(x, end), _y(value, scale)) for x, value in pairs if not scale.is_log or value > 0]
        if len(shown) >= _FEWEST_JOINED:
            parts.append(f"<path class='{style}' d='M{'L'.join(f'{x} {y}' for x, y in shown)}'/>")
        if len(shown) < _FEW_POINTS:
            parts += [
                f"<circle class='{colour}' cx={x} cy={y} r={3.5 if len(shown) < _FEWEST_JOINED else 2.5} />"
                for x, y in shown
            ]
    return "".join(parts)


def _colour(line: Series) -> str:
    """The classes of the style of a line."""
    return f"c{line.colour % NUM_COLOURS}{' dashed' if line.colour >= NUM_COLOURS else ''}"


def _x(value: float, end: float) -> float:
    return round(float(LEFT + _PLOT_WIDTH * value / end), 1)


def _y(value: float, scale: AxisScale) -> float:
    y = float(TOP + _PLOT_HEIGHT * (1 - scale.share(value)))
    return round(min(max(y, -_FAR), _FAR), 1)


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
