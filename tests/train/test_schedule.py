"""The learning rate, evaluations and checkpoints as functions of the step."""

import itertools
import math

import numpy as np
import pytest

from kit.config.recipe import Recipe
from kit.data.feed.order import Order
from kit.data.open import Data
from kit.train.schedule import evaluation_is_due, learning_rate, save_is_due, warmup_length

KINDS = ["constant", "linear", "cosine"]
PEAK = 3e-4


def curve(kind, total, warmup):
    return [learning_rate(step, total, PEAK, warmup, kind) for step in range(total)]


CASES = list(itertools.product(KINDS, [1, 2, 7, 100], [0, 1, 5, 0.03, 0.5]))


@pytest.mark.parametrize(("kind", "total", "warmup"), CASES)
def test_every_rate_trains_and_none_exceeds_the_peak(kind, total, warmup):
    """No step is wasted at rate 0, neither the first nor the last."""
    assert all(0 < rate <= PEAK for rate in curve(kind, total, warmup))


@pytest.mark.parametrize(("kind", "total", "warmup"), CASES)
def test_it_climbs_to_the_peak_and_then_never_again(kind, total, warmup):
    rates, length = curve(kind, total, warmup), warmup_length(warmup, total)
    climb, rest = rates[:length], rates[length:]
    assert all(a < b for a, b in itertools.pairwise(climb))
    assert all(a >= b for a, b in itertools.pairwise(rest))
    if length <= total:
        assert max(rates) == PEAK
    if length:
        assert climb == pytest.approx([PEAK * (i + 1) / length for i in range(len(climb))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "warmup"), [(20, 4), (13, 0), (50, 10)])
def test_the_shapes_are_those_of_transformers_one_step_on(kind, total, warmup):
    """Theirs spends step 0 at rate 0 where there is a warm-up; ours starts where theirs is after one step."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    theirs = get_scheduler(kind if kind != "constant" else "constant_with_warmup", optimizer, warmup, total)
    climb = theirs.lr_lambdas[0]
    ours = curve(kind, total, warmup)
    assert ours[:warmup] == pytest.approx([PEAK * climb(step + 1) for step in range(warmup)])
    assert ours[warmup:] == pytest.approx([PEAK * climb(step) for step in range(warmup, total)])


def test_known_points():
    assert learning_rate(0, 100, 1.0, 10, "cosine") == pytest.approx(0.1)
    assert learning_rate(9, 100, 1.0, 10, "cosine") == 1.0
    assert learning_rate(55, 100, 1.0, 10, "cosine") == pytest.approx(0.5)
    assert learning_rate(55, 100, 1.0, 10, "linear") == pytest.approx(0.5)
    assert learning_rate(99, 100, 1.0, 10, "constant") == 1.0
    assert learning_rate(99, 100, 1.0, 10, "linear") == pytest.approx(1 / 90)
    assert learning_rate(99, 100, 1.0, 10, "cosine") == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))


def test_warmup_below_one_is_a_share_of_all_steps_rounded_up():
    assert [warmup_length(share, 100) for share in (0, 0.03, 0.001, 0.999)] == [0, 3, 1, 100]
    assert [warmup_length(count, 100) for count in (1, 10, 250)] == [1, 10, 250]


def test_a_resumed_run_sees_the_same_rates_in_any_order():
    forwards = curve("cosine", 40, 5)
    backwards = [learning_rate(step, 40, PEAK, 5, "cosine") for step in reversed(range(40))]
    assert forwards == backwards[::-1]


def due(is_due, **settings):
    """The steps after which it is due, of a run of two epochs and a half of 30 samples, 4 a step: 19 steps."""
    recipe = Recipe(model_name_or_path="m", dataset="d", num_train_epochs=2.5, **settings)
    order = Order(np.full(30, 9), np.zeros(30, np.int16), 42, 4)
    data = Data(train=None, evaluation=None, order=order, chat_template=None)
    assert data.total_steps(recipe) == 19
    return [step for step in range(20) if is_due(recipe, data, step)]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, []),
        ({"save_strategy": "no"}, []),
        ({"save_steps": 6}, [6, 12, 18]),
        ({"save_strategy": "steps", "save_steps": 6}, [6, 12, 18]),
        ({"save_strategy": "epoch"}, [8, 15]),  # 30 samples are complete after 7.5 steps, 60 after 15
    ],
)
def test_a_checkpoint_is_due_every_so_many_steps_or_when_an_epoch_is_complete(settings, steps):
    assert [step for step in due(save_is_due, **settings) if step] == steps
    of_evaluation = {key.replace("save", "eval"): value for key, value in settings.items()}
    assert due(evaluation_is_due, **of_evaluation) == [*steps, 19]
    assert due(evaluation_is_due, **of_evaluation, eval_on_start=True) == [0, *steps, 19]
