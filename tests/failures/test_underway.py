"""A long first step is reported while it runs; steps as long as usual are not."""

from types import SimpleNamespace

import pytest

from kit.failures import underway
from kit.failures.underway import Underway
from kit.phases import EVALUATING, READING, SAVING, TRAINING


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0, waited=7.0)
    monkeypatch.setattr(underway.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(underway, "waited_seconds", lambda thread: clock.waited)
    return clock


def lines(steps, clock, seconds):
    """What is said while ``seconds`` pass, asked once a second as the thread does."""
    found = []
    for _ in range(seconds):
        clock.now += 1
        clock.waited += 0.75
        found += filter(None, [steps.due()])
    return found


def test_the_first_step_is_reported_again_each_time_that_it_took_twice_as_long(clock):
    steps = Underway(on_cpu=True)
    steps.enter(READING, 41)
    assert lines(steps, clock, 9) == []
    steps.enter(TRAINING, 41)
    assert lines(steps, clock, 71) == [
        "step 41 is under way: 10 s, 8 s of it in wait for data from other ranks",
        "step 41 is under way: 20 s, 15 s of it in wait for data from other ranks",
        "step 41 is under way: 40 s, 30 s of it in wait for data from other ranks",
        "step 41 is under way: 80 s, 60 s of it in wait for data from other ranks",
    ]


def test_on_a_gpu_nothing_is_said_of_waiting(clock):
    steps = Underway(on_cpu=False)
    steps.enter(READING, 1)
    assert lines(steps, clock, 12) == ["step 1 is under way: 10 s"]


def test_later_steps_are_reported_if_they_take_far_longer_than_those_before(clock):
    steps = Underway(on_cpu=False)
    for step in (1, 2, 3):
        steps.enter(READING, step)
        steps.enter(TRAINING, step)
        assert len(lines(steps, clock, 30)) == (2 if step == 1 else 0)
    steps.enter(READING, 4)
    assert lines(steps, clock, 100) == ["step 4 is under way: 90 s"]


def test_evaluating_and_saving_are_no_step(clock):
    steps = Underway(on_cpu=False)
    steps.enter(READING, 1)
    for phase in (EVALUATING, SAVING):
        steps.enter(phase, 1)
        assert lines(steps, clock, 100) == []
