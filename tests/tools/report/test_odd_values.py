"""A stranger's files of a run, or damaged ones: a report draws what it can, or names the file and the field."""

import copy
import json

import pytest
from report_helpers import evaluation_row, make_run, pair_evaluation, pair_row, record, step_row

from kit.cli.report import _as_text
from kit.errors import UserError
from kit.tools.report.comparison import comparison_page
from kit.tools.report.run_page import run_page
from kit.tools.report.runs import read_reported_run
from kit.visible import joined

ODD = [None, True, -1, 10**400, float("nan"), 1e308, 1e-320, "x\x1b\n", "\ud800", [], {"a": {"b": None}}]
ANSWERS = [{"prompt": "a", "reference": "b", "text": "c", "exact": False}]
ROWS = [
    evaluation_row(0, answers=ANSWERS, num_answers=1, num_unended_answers=1),
    *map(step_row, range(1, 4)),
    step_row(4, loss_spike=3.0, samples=["a:1"]) | {"loss/a": 1.0, "supervised_tokens/a": 3},
    evaluation_row(4, answers=ANSWERS),
    {"step": 5, "epoch": 1.0, "nonfinite": "loss nan", "samples": ["a:1"]},
]


def whole():
    values = record(finished_steps=0, interrupted=None, ended_early=None, recipe_name="r")
    values["strategy"] |= {"device": "NVIDIA H100 80GB HBM3", "mixed_precision": "bf16"}
    values["data"]["sources"][0] |= {"num_truncated": 3, "num_skipped": 1}
    values["starts"] = [{"step": 3, "time": "2026-03-01T09:30:00+00:00", "changed": ["seed: 1 -> 2"]}]
    return values | {"plan": {"tensors": 1e9, "operations_per_token": 1e6}}


def places(value, path=()):
    """The path of each value in JSON, of long lists only the first two."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def changed(value, path, odd):
    value = copy.deepcopy(value)
    *above, last = path
    inner = value
    for key in above:
        inner = inner[key]
    inner[last] = odd
    return value


def tried(folder, where, run, rows):
    """Draw a run. Returns the message of the error, if it ends with one."""
    make_run(folder, rows)
    (folder / "run.json").write_text(json.dumps(run))
    try:
        page = run_page(read_reported_run(folder))
        assert "\x1b" not in page and page.encode(), where
    except UserError as error:
        assert str(folder / "run.json") in str(error), where
        return str(error)
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    return ""


RECIPE = ["max_grad_norm", "router_aux_loss_coef", "dataset", "learning_rate", "max_length", "global_batch_size"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["recipe", "strategy", "data", "versions", "starts", "plan", ""])
def test_a_value_of_the_record_that_no_run_writes_is_named_or_left_out(part, tmp_path):
    run = whole()
    paths = [path for path in places(run) if (path[0] == part and path[1:]) or (not part and not path[1:])]
    for path in paths:
        if part == "recipe" and path[1] not in RECIPE:
            continue  # all are validated alike
        for odd in ODD:
            message = tried(tmp_path, f"{path} = {str(odd)[:30]!r}", changed(run, path, odd), ROWS[:3])
            if part in ("recipe", "strategy") and message:
                assert f"{part}.{path[1]}" in message, path


@pytest.mark.slow
def test_a_value_of_the_metrics_that_no_run_writes_is_left_out(tmp_path):
    for key in sorted({key for row in ROWS for key in row}):
        for odd in ODD:
            rows = [row | {key: odd} if key in row else row for row in ROWS]
            assert not tried(tmp_path, f"{key} = {str(odd)[:30]!r}", whole(), rows)
    for key in ANSWERS[0]:
        for odd in ODD:
            assert not tried(tmp_path, key, whole(), [ROWS[0] | {"answers": [ANSWERS[0] | {key: odd}]}, *ROWS[1:]])


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "simpo", "kto"])
def test_a_value_of_preferences_that_no_run_writes_is_left_out(objective, tmp_path):
    run = whole()
    run["recipe"]["objective"] = objective
    rows = [pair_evaluation(0, kl=0.5), *map(pair_row, range(1, 25)), pair_evaluation(25, kl=0.5, nll_loss=1.0)]
    for key in sorted({key for row in rows for key in row if "/" in key or key in ("eval_kl", "objective")}):
        for odd in [*ODD, 0]:
            where = f"{key} = {str(odd)[:30]!r}"
            assert not tried(tmp_path, where, run, [row | {key: odd} if key in row else row for row in rows])
    for odd in [*ODD, 0]:
        run["data"]["evaluation"]["num_samples"] = odd
        assert not tried(tmp_path, f"num_samples = {str(odd)[:30]!r}", run, rows)


def test_runs_with_odd_values_are_compared(tmp_path):
    run = whole()
    run["versions"]["torch"] = run["data"]["evaluation"]["fingerprint"] = "x\x1b[2J\nerror: forged\ud800"
    runs = [read_reported_run(make_run(tmp_path / "one"))]
    make_run(tmp_path / "two", [row | {"loss": -1.0, "seconds": 1e308} for row in ROWS])
    (tmp_path / "two/run.json").write_text(json.dumps(run))
    runs.append(read_reported_run(tmp_path / "two"))
    shown = joined(_as_text(runs))
    assert "\nerror: forged" not in shown and "\x1b" not in shown + comparison_page(runs) and shown.encode()


@pytest.mark.parametrize("text", ["", "[" * 100_000, "null\n", "1" * 6000, '{"step":1e400}\n', "\0" * 9])
def test_files_that_hold_something_else_end_a_report_with_words(text, tmp_path):
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(text)
    run_page(read_reported_run(tmp_path))
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match="no record of a run"):
        read_reported_run(tmp_path)
