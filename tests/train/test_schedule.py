"""The learning rate as a function of the step."""

import itertools
import math

import pytest

from kit.train.schedule import learning_rate, warmup_length

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
