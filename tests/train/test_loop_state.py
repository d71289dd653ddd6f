"""The loop state survives a checkpoint, as if there had been no stop."""

import json
import math
from dataclasses import fields

import torch

from kit.config.recipe import Recipe
from kit.train import loop_state, loss_scaling
from kit.train.loop_state import LoopState
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


def test_the_scale_of_the_loss_follows_overflows_as_that_of_torch_and_they_are_not_counted_as_not_finite(monkeypatch):
    monkeypatch.setattr(loss_scaling, "GROWTH_STEPS", 3)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, state = torch.optim.SGD([weight]), LoopState()
    assert state.loss_scale == theirs.get_scale()
    for step, norm in enumerate([math.inf, math.nan, 1, 1, 1, math.inf, 1, 1, 1, 1, 1, 1, 1, math.inf], 1):
        theirs.scale((weight * norm).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        state.end_step(step, StepResult(1.0, norm, loss_scale=state.loss_scale), 1.5)
        assert (state.loss_scale, state.good_steps) == (theirs.get_scale(), theirs._get_growth_tracker()), step
        state = through_a_checkpoint(state)
    assert (state.overflows, state.nonfinite_steps, len(state.recent_losses)) == (4, 0, 10)
    scale = state.loss_scale
    state.end_step(15, StepResult(math.nan, math.nan, loss_scale=scale), 1.5)  # no scale helps the loss
    assert (state.overflows, state.nonfinite_steps, state.loss_scale) == (4, 1, scale)


def test_steps_that_are_not_finite_are_counted_in_a_row_through_a_resume():
    state = LoopState()
    for step, loss in enumerate([1.0, math.nan, math.inf, 1.0, math.nan], 1):
        assert end(state, step, loss, spike_ratio=1.5) is None
    assert state.nonfinite_steps == 1 and state.recent_losses == [1.0, 1.0]
    again = through_a_checkpoint(state)
    end(again, 6, 1.0, grad_norm=math.inf)
    assert again.nonfinite_steps == 2 and again.recent_losses == [1.0, 1.0]


def test_of_margins_more_is_better_through_resumes():
    state, metric, found = LoopState(), "eval_rewards/margins", []
    for step, value in [(0, math.nan), (2, 0.5), (4, 0.75), (6, 0.75), (8, 0.7), (10, 0.8)]:
        found.append(state.end_evaluation(step, {"eval_loss": 1.0 + step, metric: value}, metric=metric))
        state = through_a_checkpoint(state)
    assert found == [False, True, True, False, False, True]
    assert state.best == {"step": 10, metric: 0.8} and state.stale_evaluations == 0


def test_evaluations_without_improvement_are_counted_through_resumes():
    losses, stale = [3.0, 2.0, 2.0, math.nan, 2.5, 1.9], [0, 0, 1, 1, 2, 0]
    recipe = Recipe(model_name_or_path="m", dataset="d", early_stopping_patience=2)
    state, counted = LoopState(), []
    for step, loss in enumerate(losses):
        state.end_evaluation(step, {"eval_loss": loss})
        state = through_a_checkpoint(state)
        counted.append(state.stale_evaluations)
        assert bool(state.early_stop_reason(recipe, 100)) == (counted[-1] >= 2)
    assert counted == stale
    assert LoopState(stale_evaluations=9).early_stop_reason(Recipe(model_name_or_path="m", dataset="d"), 100) == ""
