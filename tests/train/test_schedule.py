"""The learning rate, evaluations and checkpoints as functions of the step."""

import numpy as np
import pytest

from kit.config.recipe import Recipe
from kit.data.feed.data import Data
from kit.data.feed.order import Order
from kit.train.schedule import (
    count_steps,
    evaluation_is_due,
    learning_rate,
    save_is_due,
    schedule_change,
)

PEAK = 3e-4
SHAPES = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "inverse_sqrt": {},
    "warmup_stable_decay": {"lr_decay_steps": 5, "min_lr_rate": 0.1},
}


def recipe(kind, warmup, peak=PEAK, **changes):
    settings = {"learning_rate": peak, "lr_scheduler_type": kind, "warmup_steps": warmup, **SHAPES[kind], **changes}
    return Recipe(model_name_or_path="m", dataset="d", **settings)


def rate_of(settings, step, total_steps):
    return learning_rate(settings, settings.peak_learning_rate, step, total_steps)


def curve(kind, total, warmup, **changes):
    return [rate_of(recipe(kind, warmup, **changes), step, total) for step in range(total)]


def test_the_shapes_are_those_of_transformers_one_step_on():
    """Theirs spends step 0 at rate 0 where there is a warm-up; ours starts where theirs is after one step."""
    import torch
    from transformers import get_scheduler

    for kind in SHAPES:
        for total, warmup in [(20, 4), (13, 0), (50, 10)]:
            case = kind, total, warmup
            options = {"warmup_stable_decay": {"num_decay_steps": 5, "min_lr_ratio": 0.1}}.get(kind, SHAPES[kind])
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
            name = kind if kind != "constant" else "constant_with_warmup"
            theirs = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=options).lr_lambdas[0]
            ours = curve(kind, total, warmup)
            if kind != "warmup_stable_decay":  # in which theirs climbs from the lowest rate, not from 0
                assert ours[:warmup] == pytest.approx([PEAK * theirs(step + 1) for step in range(warmup)]), case
            assert ours[warmup:] == pytest.approx([PEAK * theirs(step) for step in range(warmup, total)]), case


def test_a_number_of_steps_below_one_is_a_fraction_of_all_rounded_up():
    assert [count_steps(share, 100) for share in (0, 0.03, 0.001, 0.999)] == [0, 3, 1, 100]
    assert [count_steps(count, 100) for count in (1, 10, 250)] == [1, 10, 250]


def due(is_due, **settings):
    """The steps after which it is due, of a run of two epochs and a half of 30 samples, 4 a step: 19 steps."""
    recipe = Recipe(model_name_or_path="m", dataset="d", num_train_epochs=2.5, **settings)
    order = Order(np.full(30, 9), np.zeros(30, np.int16), 42, 4)
    data = Data(settings=recipe, train=None, evaluation=None, order=order, datasets=(), encoder=None, seed=42)
    assert data.total_steps(recipe) == 19
    known = (recipe, data, 19)
    return [step for step in range(20) if is_due(*known, step)]


def test_a_checkpoint_is_due_every_n_steps_or_when_an_epoch_is_complete():
    cases = [
        ({}, []),
        ({"save_strategy": "no"}, []),
        ({"save_steps": 6}, [6, 12, 18]),
        ({"save_strategy": "steps", "save_steps": 6}, [6, 12, 18]),
        ({"save_steps": 0.5}, [10]),  # of all 19, rounded up
        ({"save_strategy": "epoch"}, [8, 15]),  # 30 samples are complete after 7.5 steps, 60 after 15
    ]
    for case in cases:
        settings, steps = case
        assert [step for step in due(save_is_due, **settings) if step] == steps, case
        of_evaluation = {key.replace("save", "eval"): value for key, value in settings.items()}
        assert due(evaluation_is_due, **of_evaluation) == [*steps, 19], case
        assert due(evaluation_is_due, **of_evaluation, eval_on_start=True) == [0, *steps, 19], case


def test_a_run_that_becomes_longer_reports_how_its_rate_changes():
    (line,) = schedule_change(recipe("cosine", 0.03, 1e-3), 1e-3, 50, 100, 200)
    before, after = (rate_of(recipe("cosine", 0.03, 1e-3), 50, total) for total in (100, 200))
    assert (
        f"had 100 steps and now has 200, so its learning rates change: step 51 has {after:.3g} instead of {before:.3g}"
        in line
    )
    assert before < 0.6e-3 < 0.8e-3 < after
