"""A line says where the time of its steps went: to data, to padding, to a slow rank. What is unknown is absent."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.data.feed.feed import GlobalBatch
from kit.data.feed.ranks import Ranks
from kit.memory.operations import model_operations_per_token
from kit.memory.workload import Workload
from kit.run import throughput as module
from kit.run.throughput import Throughput, speed_text
from kit.tools.plan.models import find_shape
from kit.train.step import StepResult


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


def group(others=(), device="cpu"):
    """What rank 0 knows of all ranks; ``others`` are the numbers of the others: data, own, memory."""

    def total(table):
        assert table.device.type == "cpu"  # numbers of the hosts, which no device is asked for
        for rank, numbers in enumerate(others, start=1):
            assert not table[rank].any()
            table[rank] = torch.tensor(numbers, dtype=torch.float64)
        return table

    return Ranks(0, 1 + len(others), total), torch.device(device)


def taken(clock, group, own=(0.5,), waited=0.0):
    """The entries of a line after steps of a second and 100 tokens each, in which rank 0 took ``own`` for itself."""
    throughput = Throughput(*group)
    for seconds in own:
        clock.now += 1.0
        counts = np.array([100])
        batch = GlobalBatch([], counts / 2, counts // 2, counts, 0.5, [], waited_seconds=waited)
        throughput.add(batch, StepResult(1.0, 1.0, own_seconds=seconds))
    return throughput.take()


def test_the_slowest_rank_is_named_with_the_share_of_the_time_that_others_wait_for_it(clock):
    others = [(0.0, 1.0, 7.0), (0.0, 1.8, 2**50)]
    row = taken(clock, group(others), own=(0.25, 0.25))  # in 2 s: 0.5, 1.0 and 1.8 s of their own; the mean is 1.1
    assert row["slowest_rank"] == 2 and row["rank_wait_share"] == pytest.approx(0.7 / 2)
    assert row["highest_peak_memory_bytes"] == 2**50
    assert "35% waiting for rank 2" in speed_text(row) and "100 tok/s" in speed_text(row)
    row = taken(clock, group([(0.4, math.nan, 7.0)]), own=(None,))  # of sharded weights only the wait for data is known
    assert row["slowest_rank"] == 1 and row["rank_wait_share"] == pytest.approx(0.2)
    json.loads(json.dumps(row, allow_nan=False))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_operations_are_those_of_the_real_lengths_and_targets_without_padding_and_recomputation(clock, method):
    workload = Workload(shape=find_shape("llama-1b"), method=method, gradient_checkpointing=True, length=1000)
    throughput = Throughput(*group(), workload)
    counts = np.array([30])
    real = {"num_tokens": 30, "targets": torch.zeros(15), "squared_lengths": 500}
    clock.now += 2.0
    batch = GlobalBatch([SimpleNamespace(input_ids=torch.zeros(2, 32), **real)], counts, counts, counts, 0.5, [])
    throughput.add(batch, StepResult(1.0, 1.0))
    expected = model_operations_per_token(workload, supervised=0.5, seen=500 / 30)
    assert throughput.take()["tflops_per_second"] == pytest.approx(30 * expected / 2.0 / 1e12)
