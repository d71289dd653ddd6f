"""A line reports throughput and the time lost to data and padding. Unknown values are absent."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import GlobalBatch
from kit.memory.operations import operations_per_token, without_recomputation
from kit.memory.workload import Workload
from kit.run import throughput as module
from kit.run.throughput import Throughput, speed_text
from kit.tools.plan.models import find_shape


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


def test_the_longest_wait_for_data_and_the_highest_memory_of_all_ranks_count(clock):
    def total(table):
        assert table.device.type == "cpu" and not table[1].any()  # numbers of the hosts, which no device is asked for
        table[1] = torch.tensor([0.7, 2.0**50])
        return table

    throughput = Throughput(Ranks(0, 2, total), torch.device("cpu"))
    for _ in range(2):
        clock.now += 1.0
        counts = np.array([100])
        throughput.add(GlobalBatch([], counts / 2, counts // 2, counts, 0.5, [], waited_seconds=0.1))
    row = throughput.take()
    assert row["data_wait_share"] == pytest.approx(0.35) and row["highest_peak_memory_bytes"] == 2**50
    assert "35% waiting for data" in speed_text(row) and "100 tok/s" in speed_text(row)
    json.loads(json.dumps(row, allow_nan=False))


def test_the_time_that_is_left_is_not_that_of_a_slow_first_step(clock):
    throughput = Throughput(Ranks(), torch.device("cpu"))
    left = []
    for seconds in (9.0, 1.0, 1.0):
        clock.now += seconds
        throughput.add(GlobalBatch([], np.array([1]), np.array([1]), np.array([1]), 0.5, []))
        throughput.take()
        left.append(throughput.seconds_of(10))
    assert left == [0.0, 10.0, 10.0]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_operations_are_those_of_the_real_lengths_and_targets_without_padding_and_recomputation(clock, method):
    workload = Workload(shape=find_shape("llama-1b"), method=method, gradient_checkpointing=True, length=1000)
    throughput = Throughput(Ranks(), torch.device("cpu"), workload)
    counts = np.array([30])
    real = {"num_tokens": 30, "targets": torch.zeros(15), "squared_lengths": 500}
    clock.now += 2.0
    batch = GlobalBatch([SimpleNamespace(input_ids=torch.zeros(2, 32), **real)], counts, counts, counts, 0.5, [])
    throughput.add(batch)
    expected = operations_per_token(without_recomputation(workload), supervised=0.5, seen=500 / 30)
    assert throughput.take()["tflops_per_second"] == pytest.approx(30 * expected / 2.0 / 1e12)
