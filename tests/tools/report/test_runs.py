"""A run is read as far as it came, whatever is damaged; what is no run is refused."""

import json

import pytest
from report_helpers import evaluation_row, make_run, opened, opened_pairs, pair_evaluation, pair_row, step_row

from kit import lock
from kit.errors import UserError
from kit.tools.report.runs import duration, read_reported_run


def test_what_no_run_writes_is_left_out(tmp_path):
    rows = [
        {"step": 1, "loss": "abc", "grad_norm": None, "learning_rate": True, "tokens_per_second": [1]},
        {"step": 2, "loss": 2.0, "samples": 3, "nonfinite": 1, "answers": ["no"], "grad_norm": float("nan")},
    ]
    metrics = opened(tmp_path, rows).metrics
    assert metrics.num_rows == 2 and len(metrics.training) == 1
    assert {key: metrics.training.values(key).tolist() for key in metrics.training.keys} == {"step": [2], "loss": [2]}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "not finished: 4 of 9 steps, and no process is at work; the same command continues it"),
        ({"total_steps": None}, "not finished: 4 steps, and no process is at work; the same command continues it"),
        ({"finished_steps": 4}, "finished after 4 steps"),
        ({"finished_steps": 4, "ended_early": "enough"}, "finished after 4 steps, before its last one: enough"),
        ({"interrupted": 4}, "stopped after 4 of 9 steps; the same command continues it"),
    ],
)
def test_the_status_says_how_far_it_came(tmp_path, changes, status):
    assert opened(tmp_path, **changes).status == status


def test_a_run_at_work_says_how_long_it_will_take(tmp_path, monkeypatch):
    def in_use(folder):
        raise UserError()

    monkeypatch.setattr(lock, "check_free", in_use)
    run = opened(tmp_path, [step_row(step) for step in range(1, 5)])
    assert run.is_at_work and run.status == "running: 4 of 9 steps so far, about 10 s left"


def test_the_two_losses_are_one_measure_unless_the_objective_is_another(tmp_path):
    assert opened(tmp_path / "a").has_one_loss
    other = opened(tmp_path / "b", [step_row(1, objective="FocalLoss")])
    assert (other.objective, other.has_one_loss) == ("FocalLoss", False)
    assert not opened(tmp_path / "c", [step_row(1, router_loss=0.1)]).has_one_loss


def test_of_preferences_the_two_losses_are_one_measure(tmp_path):
    assert opened_pairs(tmp_path / "a", [pair_row(1)]).has_one_loss
    assert not opened_pairs(tmp_path / "b", [pair_row(1, router_loss=0.1)]).has_one_loss


def test_the_objective_is_named_with_what_changes_its_loss(tmp_path):
    cases = [
        ({"objective": "sft"}, ""),
        ({"objective": "sft", "label_smoothing_factor": 0.1}, "sft, label_smoothing_factor 0.1"),
        ({"objective": "dft"}, "dft"),
        ({"objective": "dpo", "precompute_reference": True}, "dpo, beta 0.1"),
        ({"objective": "dpo", "dpo_loss": "robust", "label_smoothing": 0.2}, "dpo, beta 0.1, dpo_loss robust, "),
        ({"objective": "simpo", "simpo_gamma": 1.0}, "simpo, beta 2, simpo_gamma 1"),
    ]
    for settings, text in cases:
        found = opened_pairs(tmp_path, [pair_row(1)], settings=settings).objective_text
        assert found == text or (text.endswith(", ") and found == f"{text}label_smoothing 0.2"), (settings, text)


def test_how_many_pairs_are_right_is_left_out_where_the_model_equals_its_reference(tmp_path):
    rows = [pair_evaluation(0, rewards__accuracies=0.0), pair_evaluation(2)]
    key = "eval_rewards/accuracies"
    assert [row.get(key) for row in opened_pairs(tmp_path / "a", rows).evaluations] == [None, 0.875]
    without = opened_pairs(tmp_path / "b", rows, settings={"objective": "orpo"})
    assert [row.get(key) for row in without.evaluations] == [0.0, 0.875]


def test_utilisation_needs_a_known_device(tmp_path):
    peak = {"operations_per_token": 6e9 * 989.4}
    strategy = json.loads((make_run(tmp_path) / "run.json").read_text())["strategy"]
    gpu = opened(tmp_path, plan=peak, strategy=strategy | {"device": "NVIDIA H100"})
    assert gpu.utilisation_per_speed == pytest.approx(6e9 / (2 * 1e12)) and gpu.device == "GPU"
    assert opened(tmp_path, plan=peak).utilisation_per_speed is None  # on a CPU
    assert opened(tmp_path, strategy=strategy | {"device": "NVIDIA H100"}).utilisation_per_speed is None


@pytest.mark.parametrize("damage", [{"data": None}, {"data": {"train": {}}}, {"versions": 3}])
def test_a_damaged_record_is_refused(tmp_path, damage):
    with pytest.raises(UserError, match=r"run.json: no record of a run"):
        opened(tmp_path, **damage)


def test_metrics_that_cannot_be_read_are_refused_and_absent_ones_are_none_yet(tmp_path):
    (make_run(tmp_path) / "metrics.jsonl").unlink()
    assert read_reported_run(tmp_path).metrics.num_rows == 0
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be read"):
        read_reported_run(tmp_path)


def test_starts_that_are_damaged_are_left_out(tmp_path):
    good = {"step": 2, "time": "2026-01-01T00:00:00+00:00", "changed": []}
    assert opened(tmp_path, starts=[good, 3, {"step": "x"}]).starts == [good]
    assert opened(tmp_path, starts=3).starts == []


def test_the_duration_is_that_of_the_last_line(tmp_path):
    assert opened(tmp_path, [step_row(1), evaluation_row(1, seconds=99.0)]).seconds == 99.0


def test_durations_are_words():
    for seconds, text in [(7, "7 s"), (89, "89 s"), (600, "10 min"), (11100, "3 h 5 min"), (200000, "2 d 7 h")]:
        assert duration(seconds) == text, (seconds, text)
