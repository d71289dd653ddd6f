"""What the loop counts goes through a checkpoint and comes back as if there had been no stop."""

import json
import math
from dataclasses import fields
from types import SimpleNamespace

import pytest

from kit.config.recipe import Recipe
from kit.train import loop_state
from kit.train.loop_state import FEWEST_LOSSES, RECENT_STEPS, LoopState
from kit.train.step import StepResult


def through_a_checkpoint(state):
    return LoopState.from_record(json.loads(json.dumps(state.record())))


def end(state, step, loss, grad_norm=1.0, spike_ratio=0.0):
    return state.end_step(step, StepResult(loss, grad_norm), spike_ratio)


def test_all_of_it_comes_back(monkeypatch):
    monkeypatch.setattr(loop_state.time, "perf_counter", lambda: 0.0)
    state = LoopState(step=3, feed={"cursors": [1]}, evaluated_step=2, first_evaluation={"eval_loss": 2.0})
    state.last_evaluation, state.best = {"eval_loss": 1.0}, {"step": 2, "eval_loss": 1.0}
    state.nonfinite_steps, state.recent_losses, state.tracker_id = 1, [2.0, 1.5], "ab12"
    state.stale_evaluations, state.tokens_seen = 2, 900
    assert through_a_checkpoint(state) == state
    assert list(state.record()) == [each.name for each in fields(LoopState)]


def test_the_state_of_an_earlier_or_a_later_version_is_read_too():
    record = {key: value for key, value in LoopState(step=3).record().items() if key != "tracker_id"}
    again = LoopState.from_record({**record, "of_a_later_version": 1, "optimizer_scalars": {}})
    assert (again.step, again.tracker_id) == (3, "")


def test_seconds_are_without_the_time_between_two_starts(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(loop_state.time, "perf_counter", lambda: clock.now)
    state = LoopState()
    clock.now += 7.0
    state.start_clock()
    clock.now += 3.0
    again = through_a_checkpoint(state)
    clock.now += 1000.0
    again.start_clock()
    clock.now += 2.0
    assert again.elapsed_seconds == 5.0


def test_a_loss_above_a_median_of_0_is_no_spike():
    """As of a data set that is known by heart: no loss is a multiple of 0."""
    state = LoopState()
    for step in range(1, 12):
        end(state, step, 0.0, spike_ratio=3.0)
    assert end(state, 12, 0.1, spike_ratio=3.0) is None


def test_a_loss_far_above_the_median_is_a_spike_through_a_resume():
    state = LoopState()
    for step in range(1, 12):
        assert end(state, step, 2.0, spike_ratio=3.0) is None
    again = through_a_checkpoint(state)
    assert end(again, 12, 5.9, spike_ratio=3.0) is None
    spike = end(again, 13, 6.1, spike_ratio=3.0)
    assert spike.ratio == pytest.approx(3.05) and spike.num_steps == 12
    assert end(again, 14, 2.0, spike_ratio=3.0) is None and again.step == 14


def test_a_ratio_of_zero_never_looks():
    state = LoopState(recent_losses=[1.0] * RECENT_STEPS)
    assert end(state, 1, 1e9, spike_ratio=0.0) is None


def test_the_first_losses_are_compared_with_nothing():
    state = LoopState()
    for step in range(1, FEWEST_LOSSES + 1):
        assert end(state, step, float(2**step), spike_ratio=1.5) is None
    assert end(state, FEWEST_LOSSES + 1, 2e6, spike_ratio=1.5)


def test_only_recent_losses_are_remembered():
    state = LoopState()
    for step in range(1, 3 * RECENT_STEPS):
        end(state, step, float(step))
    assert state.recent_losses == [float(step) for step in range(2 * RECENT_STEPS, 3 * RECENT_STEPS)]


def test_steps_that_are_not_finite_are_counted_in_a_row_through_a_resume():
    state = LoopState()
    for step, loss in enumerate([1.0, math.nan, math.inf, 1.0, math.nan], 1):
        assert end(state, step, loss, spike_ratio=1.5) is None
    assert state.nonfinite_steps == 1 and state.recent_losses == [1.0, 1.0]
    again = through_a_checkpoint(state)
    end(again, 6, 1.0, grad_norm=math.inf)
    assert again.nonfinite_steps == 2 and again.recent_losses == [1.0, 1.0]


def test_the_best_evaluation_is_remembered():
    state, losses = LoopState(), [(0, 3.0), (2, 2.0), (4, 2.5), (6, math.nan)]
    assert [state.end_evaluation(step, {"eval_loss": loss}) for step, loss in losses] == [True, True, False, False]
    assert state.best == {"step": 2, "eval_loss": 2.0} and state.record()["best"] == state.best
    assert state.evaluated_step == 6 and state.first_evaluation == {"eval_loss": 3.0}
    assert not through_a_checkpoint(state).end_evaluation(8, {"eval_loss": 2.0})


MARGINS, ACCURACIES = "eval_rewards/margins", "eval_rewards/accuracies"


@pytest.mark.parametrize("metric", [MARGINS, ACCURACIES])
def test_of_accuracies_and_margins_more_is_better_through_resumes(metric):
    state, values = LoopState(), [(0, math.nan), (2, 0.5), (4, 0.75), (6, 0.75), (8, 0.7), (10, 0.8)]
    found = []
    for step, value in values:
        found.append(state.end_evaluation(step, {"eval_loss": 1.0 + step, metric: value}, metric=metric))
        state = through_a_checkpoint(state)
    assert found == [False, True, True, False, False, True]
    assert state.best == {"step": 10, metric: 0.8} and state.stale_evaluations == 0


def test_an_early_end_names_the_metric_and_the_direction():
    recipe = Recipe(model_name_or_path="m", dataset="d", early_stopping_patience=2, metric_for_best_model=MARGINS)
    state = LoopState()
    for step, margin in enumerate([0.3, 0.2, 0.1]):
        state.end_evaluation(step, {"eval_loss": 1.0 - step, MARGINS: margin}, metric=MARGINS)
    assert state.early_stop_reason(recipe, 100) == "eval_rewards/margins did not rise in the last 2 evaluations"


@pytest.mark.parametrize(("before", "after"), [("eval_loss", MARGINS), (MARGINS, "eval_loss"), (ACCURACIES, MARGINS)])
def test_a_resume_that_follows_another_metric_begins_to_look_for_the_best_again(before, after):
    """The best by one metric is not the best by another, and what did not improve says nothing of another."""
    recipe = Recipe(model_name_or_path="m", dataset="d", early_stopping_patience=2, metric_for_best_model=after)
    state, metrics = LoopState(), {"eval_loss": 0.5, MARGINS: 0.5, ACCURACIES: 0.5}
    for step in range(3):
        state.end_evaluation(step, metrics, metric=before)
    state = through_a_checkpoint(state)
    assert state.stale_evaluations == 2 and state.early_stop_reason(recipe, 100) == ""
    worse = {"eval_loss": 9.0, MARGINS: 0.1, ACCURACIES: 0.1}
    assert state.end_evaluation(3, worse, metric=after) and state.best == {"step": 3, after: worse[after]}
    assert state.stale_evaluations == 0


def test_a_state_from_before_there_was_a_choice_follows_the_loss():
    state = LoopState.from_record(LoopState(step=4).record() | {"best": {"step": 2, "eval_loss": 2.0}})
    assert not state.end_evaluation(4, {"eval_loss": 2.5}) and state.best["step"] == 2
    assert state.end_evaluation(6, {"eval_loss": 1.5}) and state.best == {"step": 6, "eval_loss": 1.5}


def test_evaluations_without_the_metric_end_nothing_early():
    """As of kto, where all answers of the evaluation data have the same label."""
    recipe = Recipe(model_name_or_path="m", dataset="d", early_stopping_patience=1, metric_for_best_model=MARGINS)
    state = LoopState()
    assert [state.end_evaluation(step, {"eval_loss": 1.0}, metric=MARGINS) for step in range(3)] == [False] * 3
    assert state.best == {} and state.early_stop_reason(recipe, 100) == ""


@pytest.mark.parametrize(
    ("threshold", "losses", "stale"),
    [
        (0.0, [3.0, 2.0, 2.0, math.nan, 2.5, 1.9], [0, 0, 1, 1, 2, 0]),
        (0.5, [3.0, 2.6, 2.2, 1.6, 1.0, 1.4], [0, 1, 2, 0, 0, 1]),  # compared with the lowest, as transformers does
    ],
)
def test_evaluations_without_improvement_are_counted_through_resumes(threshold, losses, stale):
    recipe = Recipe(model_name_or_path="m", dataset="d", early_stopping_patience=2, early_stopping_threshold=threshold)
    state, counted = LoopState(), []
    for step, loss in enumerate(losses):
        state.end_evaluation(step, {"eval_loss": loss}, threshold)
        state = through_a_checkpoint(state)
        counted.append(state.stale_evaluations)
        assert bool(state.early_stop_reason(recipe, 100)) == (counted[-1] >= 2)
    assert counted == stale
    assert LoopState(stale_evaluations=9).early_stop_reason(Recipe(model_name_or_path="m", dataset="d"), 100) == ""


@pytest.mark.parametrize(("step", "ends_early"), [(3, True), (4, False)])
def test_a_patience_that_ends_with_the_last_step_ends_nothing_early(step, ends_early):
    recipe = Recipe(model_name_or_path="m", dataset="d", early_stopping_patience=2)
    assert bool(LoopState(step=step, stale_evaluations=2).early_stop_reason(recipe, 4)) == ends_early


def test_an_evaluation_of_an_earlier_step_is_not_the_current_one():
    state = LoopState(step=4)
    assert state.current_evaluation == {}
    state.end_evaluation(4, {"eval_loss": 1.0})
    assert through_a_checkpoint(state).current_evaluation == {"eval_loss": 1.0}
    state.step = 8  # of a start without evaluation data
    assert through_a_checkpoint(state).current_evaluation == {}
