"""No call of a key-value store waits longer than the kit's own time-out."""

import threading
import time

import pytest

from kit.strategy import store as stores
from kit.strategy.store import BoundedStore, call_within


def test_a_call_ends_in_time_whatever_it_does():
    assert call_within(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        call_within(5, lambda: {}["absent"])
    with pytest.raises(TimeoutError):
        call_within(0.02, lambda: time.sleep(1))


def test_a_store_that_does_not_answer_takes_no_second_call_until_it_does(monkeypatch):
    monkeypatch.setattr(stores, "STORE_SECONDS", 0.03)
    network, calls = threading.Event(), []
    store = BoundedStore("store", "10.0.0.1:29500")

    def call(store):
        calls.append(store)
        network.wait(10)
        return "answer"

    for _ in range(3):
        with pytest.raises(TimeoutError):
            store.call(call)
    assert calls == ["store"]
    network.set()
    monkeypatch.setattr(stores, "STORE_SECONDS", 5)
    assert store.call(call) == "answer"
