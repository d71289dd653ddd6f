"""A rank's own time ends where it begins to wait for others, and nothing waits for the device to measure it."""

import time

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
