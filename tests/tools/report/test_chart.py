"""A chart shows the values of the metrics: spikes stay, axes are round, and a reader can point at any value."""

import html
import json
import re

import numpy as np
import pytest

from kit.tools.report.chart import (
    HEIGHT,
    LEFT,
    MAX_POINTS,
    TOP,
    WIDTH,
    Chart,
    Mark,
    draw,
    extents,
    series,
    thinned,
)
from kit.tools.report.metrics import Columns

ROWS = [{"step": i, "tokens_seen": 10 * i, "seconds": i / 2, "loss": 8 / i} for i in range(1, 5)]


def points(figure):
    """What a pointer finds."""
    return json.loads(html.unescape(re.search("data-points='(.*?)'", figure)[1]))


def curves(figure, classes="x-step y-lin"):
    """The points of each drawn line."""
    drawn = re.search(f"<g class='{classes}'>(.*?)</g>", figure)[1]
    paths = re.findall("<path class='line [^']*' d='M([^']*)'", drawn)
    return [[tuple(map(float, pair.split())) for pair in path.split("L")] for path in paths]


def test_a_pointer_finds_the_values_of_the_metrics_on_every_axis():
    found = points(draw([Chart("loss", [series("training", Columns(ROWS), "loss", scale=2.0)])]))
    [line] = found["lines"]
    assert line == {
        "step": [1, 2, 3, 4],
        "tokens": [10, 20, 30, 40],
        "time": [0.5, 1, 1.5, 2],
        "y": [16, 8, 5.33333, 4],
    }
    assert found["ends"] == {"step": 4, "tokens": 40, "time": 2}


def test_the_drawn_line_is_where_its_values_are():
    figure = draw([Chart("loss", [series("training", Columns(ROWS), "loss")])])
    box, (low, high) = points(figure)["box"], points(figure)["scales"]["lin"]
    assert (low, box[:2]) == (0, [LEFT, TOP])
    for row, (x, y) in zip(ROWS, curves(figure)[0], strict=True):
        assert x == pytest.approx(box[0] + box[2] * row["step"] / 4, abs=0.06)
        assert y == pytest.approx(box[1] + box[3] * (1 - row["loss"] / high), abs=0.06)
    heights = [y for _, y in curves(figure, "x-tokens y-log")[0]]  # 8, 4, 8/3, 2: equal ratios are equal distances
    assert heights[1] - heights[0] == pytest.approx(heights[3] - heights[1], abs=0.11)
    assert all(
        0 <= x <= WIDTH and 0 <= y <= HEIGHT
        for axis in ("step", "time")
        for x, y in curves(figure, f"x-{axis} y-log")[0]
    )


def test_a_spike_stays_however_many_points_there_are():
    values = np.ones(100_000)
    values[33_333], values[66_666] = 9.0, -9.0
    kept = thinned(values)
    assert {0, 33_333, 66_666, 99_999} <= set(kept) and len(kept) <= MAX_POINTS and kept == sorted(kept)
    assert thinned(np.array([1.0, 2.0, 3.0])) == [0, 1, 2]


def test_a_long_line_is_a_band_with_its_means():
    rows = [{"step": i, "loss": 4.0 if i % 2 else 2.0} for i in range(10 * MAX_POINTS)]
    figure = draw([Chart("loss", [series("", Columns(rows), "loss")])])
    band, means = curves(figure)
    assert len(band) <= MAX_POINTS and "class='line c0 band'" in figure
    middle = (min(y for _, y in band) + max(y for _, y in band)) / 2
    assert [y for _, y in means] == pytest.approx([middle] * len(means), abs=2)  # a stretch of odd length is uneven


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [3.0], [-1.0, -1.0], [1e-100, 1e100], [5.0, 5.0]])
def test_any_values_can_be_drawn(values):
    rows = [{"step": i, "loss": value} for i, value in enumerate(values)]
    figure = draw([Chart("loss", [series("", Columns(rows), "loss")])])
    assert "nan" not in figure and "inf" not in figure and len(curves(figure)) == 1
    assert ("y-log" in figure) == any(value > 0 for value in values)


def test_a_chart_without_values_is_left_out_and_an_axis_that_a_line_lacks_too():
    without_tokens = [{"step": 1, "seconds": 1.0, "loss": 1.0}]
    charts = [
        Chart("empty", [series("", Columns(ROWS), "absent")]),
        Chart("loss", [series("", Columns(without_tokens), "loss")]),
    ]
    assert draw(charts).count("<figure") == 1 and list(extents(charts)) == ["step", "time"]
    assert draw([]) == ""


def test_a_restart_is_marked_where_it_was_on_every_axis():
    figure = draw([Chart("loss", [series("", Columns(ROWS), "loss")], marks=[Mark(2, "<again>")])])
    assert figure.count("<title>&lt;again&gt;</title>") == 3 and "<again>" not in figure
    at = [
        re.search(f"<g class=x-{axis}>.*?class=mark d='M([0-9.]+) ", figure)[1] for axis in ("step", "tokens", "time")
    ]
    assert len(set(at)) == 1  # step 2 of 4, 20 of 40 tokens, 1 of 2 seconds


def test_a_restart_is_marked_at_the_same_place_in_a_chart_of_few_points():
    few = [{"step": 4, "tokens_seen": 40, "seconds": 2.0, "eval_loss": 1.0}]
    marks = [Mark(2, "again")]
    page = draw(
        [
            Chart("a", [series("", Columns(ROWS), "loss")], marks=marks),
            Chart("b", [series("", Columns(few), "eval_loss")], marks=marks),
        ]
    )
    assert len(set(re.findall("class=mark d='M([0-9.]+) ", page))) == 1


def test_names_are_text():
    figure = draw([Chart("<i>'\"", [series("<b>'\"", Columns(ROWS), "loss")], levels=[("<u>", 3.0)])])
    assert not re.search("<(b>'|i>'|u>)", figure) and figure.count("&lt;u&gt;") == 2
