"""The metrics of a run: what a page shows of them is kept, in memory that grows by bytes for each value."""

import json
import tracemalloc

import numpy as np
from report_helpers import evaluation_row, make_run, step_row

from kit.tools.report.metrics import Columns, finite_number, first_and_last, read_metrics_of


def test_a_row_without_a_value_leaves_a_gap_at_its_position():
    columns = Columns([{"step": 1}, {"step": 2, "loss": 0.5}, {"step": 3, "text": "no number"}])
    assert len(columns) == 3 and columns.keys == ["step", "loss"]
    assert columns.column("loss").tolist()[1] == 0.5 and columns.values("loss").tolist() == [0.5]
    assert columns.values("absent").tolist() == [] and len(columns.column("absent")) == 3


def test_of_answers_the_first_and_the_last_are_kept(tmp_path):
    answers = [[{"prompt": "p", "reference": "r", "text": str(i), "exact": False}] for i in range(4)]
    rows = [evaluation_row(i, answers=answer) for i, answer in enumerate(answers)] + [evaluation_row(4)]
    evaluations = read_metrics_of(make_run(tmp_path, rows)).evaluations
    assert [row.get("answers") for row in evaluations] == [answers[0], None, None, answers[3], None]


def test_a_long_run_takes_a_few_bytes_for_each_value(tmp_path):
    num_rows, row = 20_000, step_row(1, ranks={"own_seconds": [0.5] * 64})
    with (make_run(tmp_path, []) / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(row | {"step": step}) + "\n" for step in range(num_rows))
    tracemalloc.start()
    metrics = read_metrics_of(tmp_path)
    bytes_taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(metrics.training) == num_rows
    assert bytes_taken < 16 * len(metrics.training.keys) * num_rows  # as dicts: about 80 for each value


def test_a_tendency_is_that_of_the_tenths_at_both_ends():
    assert first_and_last(np.arange(100.0)) == (4.5, 94.5, 10)
    assert first_and_last(np.arange(20.0)) == (2.0, 17.0, 5) and first_and_last(np.arange(19.0)) is None


def test_what_is_no_number_is_none():
    for value in [True, None, "1", [1], float("nan"), float("inf"), 10**400]:
        assert finite_number(value) is None, value
        assert finite_number(3) == 3, value
