"""A sweep suggests a range of rates, and says when it cannot: at an end of the rates tried, or if all losses rose."""

import numpy as np

from kit.tools.rates import Sweep, Trial

STEPS = 40
BATCHES = np.random.default_rng(0).normal(0, 0.2, STEPS)  # how hard each batch is, whatever the rate


def trial(rate, end, **changes):
    """Its loss falls from 4 to ``end`` in half of the steps, and stays there."""
    course = 4 + (end - 4) * np.minimum(1, np.arange(STEPS) / (STEPS / 2))
    return Trial(rate, course + BATCHES * (np.arange(STEPS) > 0), **changes)


def sweep(*ends):
    """With rates of 1e-5, 1e-4 and so on."""
    return Sweep([trial(10 ** (i - 5), end) for i, end in enumerate(ends)], STEPS)


def test_rates_near_the_best_are_as_good():
    found = sweep(3.0, 2.0, 1.97, 3.5)
    assert found.best.rate == 1e-3 and [each.rate for each in found.range] == [1e-4, 1e-3]
    assert found.suggestion()[0] == "after 40 steps the training loss is lowest with 0.0001 to 0.001"
    assert [row[""] for row in found.rows()] == ["", "as good", "lowest", ""]
    # Their mean losses differ by half of what a batch differs from another, on every batch.
    assert [each.rate for each in sweep(2.1, 2.0, 3.0).range] == [1e-4]
    for ends, words in (((2.0, 3.0), "add lower --rates"), ((3.0, 2.0), "add higher --rates")):
        assert words in sweep(*ends).suggestion()[1]
    assert "add" not in "".join(sweep(3.0, 2.0, 3.0).suggestion())


def test_a_rate_whose_loss_rises_or_is_not_finite_is_never_the_best():
    trials = [trial(1e-4, 3.0), trial(1e-3, 4.5), Trial(1e-2, BATCHES[:3] - 9, stopped_at=4)]
    found = Sweep(trials, STEPS)
    assert found.best is trials[0]
    assert [row[""] for row in found.rows()] == ["lowest", "went up", "not finite at step 4"]
    all_up = Sweep([trial(1e-3, 2.0, stopped_at=9), trial(1e-2, 2.0, stopped_at=5)], STEPS)
    assert all_up.best is None and all_up.suggestion() == [
        "the loss went up with every rate: try --rates that are lower"
    ]


def test_the_evaluation_decides_if_all_that_ended_have_one():
    trials = [trial(1e-4, 2.0, eval_loss=3.0), trial(1e-3, 2.5, eval_loss=2.0), trial(1e-2, 9.0, stopped_at=5)]
    assert Sweep(trials, STEPS).best is trials[1]
    assert not Sweep([*trials, trial(1e-1, 3.0)], STEPS).is_evaluated
