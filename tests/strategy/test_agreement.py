"""Ranks compare what they are, in one exchange whose work grows with their number, not its square."""

import socket
import threading
from collections import Counter

import pytest

from kit.errors import Problem
from kit.strategy import agreement
from kit.strategy.agreement import Fact, compare_facts, exchange


class Store:
    """A key-value store of threads, which counts."""

    def __init__(self):
        self.values, self.calls, self.bytes, self.changed = {}, Counter(), 0, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.calls["set"] += 1
            self.bytes += len(value)
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            self.calls["get"] += 1
            assert self.changed.wait_for(lambda: key in self.values, timeout=10), key
            return self.values[key].encode()


@pytest.fixture
def exchanged(monkeypatch):
    """What each of some ranks, each with its facts and problems, comes to know; and the store."""

    def exchanged(facts, problems=()):
        store, results = Store(), {}
        problems = [*problems, *[[]] * len(facts)]
        monkeypatch.setattr(agreement, "machine_id", lambda: threading.current_thread().name)
        monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)

        def rank(number):
            results[number] = exchange(store, number, len(facts), facts[number], problems[number])

        threads = [threading.Thread(target=rank, args=(i,), name=f"host{i // 2}") for i in range(len(facts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return [results[number] for number in range(len(facts))], store

    return exchanged


def of(**values):
    return [Fact(name, value, f"fix {name}") for name, value in values.items()]


def test_ranks_that_agree_exchange_digests_only(exchanged):
    results, store = exchanged([of(seed=1, text="long" * 1000)] * 64)
    assert results == [([], [])] * 64
    assert store.calls["set"] <= 2 * 64 + 2 and store.calls["get"] <= 3 * 64 and store.bytes < 64 * 300


def test_a_difference_is_reported_to_all_with_value_host_and_ranks(exchanged):
    facts = [of(seed=1, text="long" * 1000)] * 5 + [of(seed=2, text="long" * 1000)] * 3
    results, store = exchanged(facts)
    expected = "1 on host0 (ranks 0-1), 1 on host1 (ranks 2-3), 1 on host2 (rank 4), 2 on host2 (rank 5) and 1 more"
    problem = Problem("seed", expected, "the same on every machine", "fix seed")
    assert [found for found, _ in results] == [[problem]] * 8
    assert len([key for key in store.values if key.startswith("details")]) == 1  # one rank speaks for those like it
    assert {f"read/{rank}" for rank in range(1, 8)} <= set(
        store.values
    )  # before rank 0, which may keep the store, ends


def test_a_problem_of_the_network_matters_on_several_machines_only(exchanged):
    problem = Problem("host name", "b means 127.0.1.1", fix="export GLOO_SOCKET_IFNAME=eth7")
    results, _ = exchanged([of(seed=1)] * 4, [[], [], [problem], [problem]])
    assert [found for found, _ in results] == [[problem]] * 4
    results, _ = exchanged([of(seed=1)] * 2, [[], [problem]])
    assert [found for found, _ in results] == [[]] * 2


def test_a_warning_refuses_nothing_whichever_rank_has_the_value():
    fact = Fact("NCCL_IB_DISABLE", "1", "the same", refuses=False)
    for facts in ([[fact], []], [[], [fact]]):
        problems, warnings = compare_facts(facts, ["a", "b"])
        assert problems == [] and "NCCL_IB_DISABLE: " in warnings[0] and "not set on " in warnings[0]


def test_a_long_value_is_cut_and_still_shows_which_differ():
    problems, _ = compare_facts([of(text="a" * 200 + "b"), of(text="a" * 200 + "c")], ["a", "b"])
    assert len(problems[0].found) < 300
