"""A thread's wait is what it neither computed nor was denied a core; a busy machine is no slow network."""

import threading
import time

import pytest

from kit.strategy import waiting
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


def test_another_thread_can_be_asked_about():
    need_counts()
    done, ids = threading.Event(), []
    thread = threading.Thread(target=lambda: (ids.append(threading.get_native_id()), done.wait(5)))
    thread.start()
    while not ids:
        time.sleep(0.01)
    before = waited_seconds(ids[0])
    time.sleep(0.2)
    waited = waited_seconds(ids[0]) - before
    done.set()
    thread.join()
    assert waited > 0.15


def test_without_counts_of_the_operating_system_nothing_is_known(monkeypatch):
    def absent(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(waiting, "open", absent, raising=False)
    assert waited_seconds() is None
