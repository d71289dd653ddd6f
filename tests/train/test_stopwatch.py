"""A rank's own time ends where it begins to wait for others, and nothing waits for the device to measure it."""

import time
from types import SimpleNamespace

import torch

from kit.train.stopwatch import Stopwatch


def test_it_runs_from_the_first_forward_pass_to_the_first_stop():
    model = torch.nn.Identity()
    watch = Stopwatch(model, torch.device("cpu"))
    time.sleep(0.05)  # before the forward pass: not of this rank alone
    model(1)
    time.sleep(0.02)
    watch.stop()
    seconds = watch.seconds
    time.sleep(0.02)
    watch.stop()
    assert 0.02 <= seconds < 0.05 and watch.seconds == seconds


def test_on_a_gpu_events_are_recorded_and_nothing_waits(monkeypatch):
    recorded = []

    class Event:  # has no method that waits
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            recorded.append(self)

        def elapsed_time(self, end):
            return 1500.0 * (recorded.index(end) - recorded.index(self))  # milliseconds

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    model = torch.nn.Identity()
    watch = Stopwatch(model, torch.device("cuda", 0))
    model(1)
    model(1)
    watch.stop()
    watch.stop()
    assert watch.seconds == 1.5 and len(recorded) == 2
