"""A thread's wait is what it neither computed nor was denied a core; a busy machine is no slow network."""

import time

import pytest

from kit.strategy.waiting import waited_seconds


def need_counts():
    if waited_seconds() is None:
        pytest.skip("NOT TESTED: this operating system does not count what threads wait")


def test_waiting_counts_and_computing_does_not():
    need_counts()
    before = waited_seconds()
    time.sleep(0.2)
    slept = waited_seconds()
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    assert slept - before > 0.15 and waited_seconds() - slept < 0.1
