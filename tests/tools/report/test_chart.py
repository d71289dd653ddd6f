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
    curves_section,
    draw,
    extents,
    series,
    thinned,
)
from kit.tools.report.metrics import Columns

ROWS = [{"step": i, "tokens_seen": 10 * i, "seconds": i / 2, "loss": 8 / i} for i in range(1, 6)]


def points(figure):
    """What a pointer finds."""
    return json.loads(html.unescape(re.search("data-points='(.*?)'", figure)[1]))


def curves(figure, classes="x-step y-zero"):
    """The points of each drawn line."""
    drawn = re.search(f"<g class='{classes}'>(.*?)</g>", figure)[1]
    paths = re.findall("<path class='line [^']*' d='M([^']*)'", drawn)
    return [[tuple(map(float, pair.split())) for pair in path.split("L")] for path in paths]


def test_a_pointer_finds_the_values_of_the_metrics_on_every_axis():
    found = points(draw([Chart("loss", [series("training", Columns(ROWS), "loss", scale=2.0)])]))
    [line] = found["lines"]
    assert line == {
        "step": [1, 2, 3, 4, 5],
        "tokens": [10, 20, 30, 40, 50],
        "time": [0.5, 1, 1.5, 2, 2.5],
        "y": [16, 8, 5.33333, 4, 3.2],
    }
    assert found["ends"] == {"step": 5, "tokens": 50, "time": 2.5}


def test_the_drawn_line_is_where_its_values_are():
    figure = draw([Chart("loss", [series("training", Columns(ROWS), "loss")])])
    box, (low, high) = points(figure)["box"], points(figure)["scales"]["zero"]
    assert (low, box[:2]) == (0, [LEFT, TOP])
    for row, (x, y) in zip(ROWS, curves(figure)[0], strict=True):
        assert x == pytest.approx(box[0] + box[2] * row["step"] / 5, abs=0.06)
        assert y == pytest.approx(box[1] + box[3] * (1 - row["loss"] / high), abs=0.06)
    heights = [y for _, y in curves(figure, "x-tokens y-log")[0]]  # 8, 4, 8/3, 2, 8/5: equal ratios are equal distances
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


def test_any_values_can_be_drawn():
    for values in [[0.0], [0.0, 0.0], [3.0], [-1.0, -1.0], [1e-100, 1e100], [5.0, 5.0]]:
        for is_fitted in [False, True]:
            case = values, is_fitted
            rows = [{"step": i, "loss": value} for i, value in enumerate(values)]
            figure = draw([Chart("loss", [series("", Columns(rows), "loss")], is_fitted=is_fitted)])
            assert not re.search("[^a-z](nan|inf)", figure) and figure.count("<circle") >= len(values), case
            assert ("y-log" in figure) == any(value > 0 for value in values), case


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
    assert len(set(at)) == 1  # step 2 of 5, 20 of 50 tokens, 1 of 2.5 seconds


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


def fitted(values, **changes):
    """The chart of a line of these values, from step 1 on, with a fitted axis."""
    rows = [{"step": i, "loss": value} for i, value in enumerate(values, 1)]
    return draw([Chart("loss", [series("training", Columns(rows), "loss")], is_fitted=True, **changes)])


def group(figure, classes):
    """What a figure shows on one choice of axes."""
    return re.search(f"<g class='{classes}'>(.*?)</g>", figure)[1]


def notes(figure):
    """What is written below a figure, by the scale."""
    return dict(re.findall("<p class='note y-([a-z]+)'>([^<]*)</p>", figure))


def test_a_fitted_axis_says_where_it_begins_and_what_lies_outside():
    figure = fitted([14.5, 9.0, *np.linspace(3.0, 2.5, 98)])
    assert notes(figure) == {"fit": "The axis begins at 2.48, not at 0. Above the axis: 2 of 100 values, up to 14.5."}
    shown = group(figure, "x-step y-fit")
    assert shown.count("class='beyond") == 1 and ">14.5</text>" in shown  # the two are one stretch
    assert "class='beyond" not in group(figure, "x-step y-zero")  # all values
    assert points(figure)["scales"]["zero"][0] == 0 and next(iter(points(figure)["scales"])) == "fit"


def test_what_lies_below_a_fitted_axis_is_named_too():
    values = np.linspace(30.0, 25.0, 100)
    values[50] = 1.0
    assert "Below the axis: 1 of 100 values, down to 1." in notes(fitted(values))["fit"]


def test_a_choice_that_changes_nothing_is_not_offered():
    assert "class=fit" not in fitted(np.linspace(3.0, 0.1, 100)) and "class=zero" in fitted(np.linspace(3.0, 0.1, 100))
    rows = [{"step": i, "share": 0.0} for i in range(9)]
    assert "type=radio" not in draw([Chart("waiting", [series("", Columns(rows), "share")])])


def test_values_that_a_logarithmic_axis_cannot_show_are_counted():
    assert notes(fitted([0.0, 1.0, 2.0, 3.0, 4.0]))["log"] == "Not shown: 1 of 5 values, 0 or less."


def test_few_points_are_not_joined_and_have_their_values():
    rows = [{"step": 0, "loss": 14.0}, {"step": 160, "loss": 0.25}]
    figure = draw([Chart("loss", [series("evaluation", Columns(rows), "loss")])])
    shown = group(figure, "x-step y-zero")
    assert "class='line" not in shown and shown.count("<circle") == 2
    assert ">14</text>" in shown and ">0.25</text>" in shown
    assert "class='line" in group(fitted([5.0, 4.0, 3.0, 2.0, 1.0]), "x-step y-zero")


def test_texts_in_a_chart_do_not_cover_each_other():
    rng = np.random.default_rng(0)
    values = 2 + 0.01 * rng.random(400)
    values[[300, 312, 324]] = (24.25, 25.25, 26.25)
    shown = group(fitted(values, levels=[("clipped at 2", 2.0)]), "x-step y-fit")
    boxes = []
    for x, y, anchor, text in re.findall(
        "<text class='value c0' x=([0-9.]+) y=([0-9.]+) text-anchor=(.*?)>(.*?)<", shown
    ):
        left = float(x) - (6 * len(text) if anchor == "end" else 0)
        boxes.append((left, float(y), left + 6 * len(text)))
    assert ("26.25" in shown) and len(boxes) >= 2
    for i, (left, y, right) in enumerate(boxes):
        assert not any(left < r and a < right and abs(y - b) < 10 for a, b, r in boxes[:i])


def test_a_chart_is_described_in_words():
    assert "aria-label='loss. training: first 8, last 1.6, lowest 1.6, highest 8.'" in draw(
        [Chart("loss", [series("training", Columns(ROWS), "loss")])]
    )


def test_the_axis_is_chosen_beside_the_charts_if_there_are_several():
    charts = [Chart("loss", [series("", Columns(ROWS), "loss")])]
    assert "id=x-tokens" in curves_section(charts)
    assert "id=x-" not in curves_section([Chart("loss", [series("", Columns([{"step": 1, "loss": 1.0}]), "loss")])])
