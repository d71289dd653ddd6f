"""Ranks compare their facts in one exchange, before they connect to each other."""

import socket
import threading

import pytest
import torch

from kit.strategy.processes.agreement import Fact, exchange
from kit.system.errors import Problem


@pytest.fixture
def exchanged(monkeypatch):
    """What each of some ranks, two on a host, comes to know."""

    def exchanged(facts, problems=()):
        store, results = torch.distributed.HashStore(), {}
        problems = [*problems, *[[]] * len(facts)]
        monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)

        def rank(number):
            results[number] = exchange(store, number, len(facts), facts[number], problems[number])

        threads = [threading.Thread(target=rank, args=(i,), name=f"host{i // 2}") for i in range(len(facts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return [results[number] for number in range(len(facts))]

    return exchanged


def of(**values):
    return [Fact(name, value, f"fix {name}") for name, value in values.items()]


def test_a_difference_is_reported_to_all_with_value_host_and_ranks(exchanged):
    assert exchanged([of(seed=1, text="long" * 1000)] * 8) == [[]] * 8
    results = exchanged([of(seed=1)] * 5 + [of(seed=2)] * 3)
    expected = "1 on host0 (rank 0, 1), 1 on host1 (rank 2, 3), 1 on host2 (rank 4), 2 on host2 (rank 5) and 1 others"
    problem = Problem("seed", expected, "the same on every machine", "fix seed")
    assert results == [[problem]] * 8


def test_a_problem_of_one_machine_is_one_of_all(exchanged):
    problem = Problem("host name", "b means 127.0.1.1", fix="export GLOO_SOCKET_IFNAME=eth7")
    assert exchanged([of(seed=1)] * 4, [[], [], [problem], [problem]]) == [[problem]] * 4
