"""A run in float32 on a GPU reports that with a remedy; missing bf16, and fp16, are refused.

The GPUs are torch's answers about them. No number of a T4 was measured.
"""

from dataclasses import replace

import pytest
from helpers import with_gpus

from kit.strategy.precision import FLOAT32, check_precision, describe_precision
from kit.strategy.strategies import DDP, HYBRID, SINGLE
from kit.strategy.topology import Topology

GPUS = {"NVIDIA A10G": True, "Tesla T4": False}  # has bf16


@pytest.fixture
def on(monkeypatch):
    """Returns a function that gives the topology of a run on a GPU of this name, or on a CPU."""

    def on(gpu, strategy=SINGLE, precision="no"):
        with_gpus(monkeypatch, (gpu, 8 if GPUS.get(gpu) else 7))
        return Topology(
            strategy=strategy,
            config_name=strategy.config,
            num_processes=4,
            num_replicas=2 if strategy.replicates else 1,
            mixed_precision=precision,
            device_type="cuda" if gpu else "cpu",
        )

    return on


def test_a_gpu_in_float32_is_reported_with_a_remedy(on):
    for gpu, has_bf16 in GPUS.items():
        topology = on(gpu, HYBRID)
        (without_config,) = describe_precision(topology, None)
        (with_config,) = describe_precision(topology, "mine.yaml")
        assert without_config.startswith("computes in float32") and check_precision(topology) == [], gpu
        if has_bf16:
            assert without_config.endswith("--config fsdp_hybrid"), gpu
            assert with_config.endswith("mixed_precision: bf16 in mine.yaml"), gpu
        else:
            assert without_config == with_config and "fp16 is not supported" in with_config, gpu


def test_bf16_is_silent_where_the_gpu_has_it_and_refused_where_torch_would_emulate_it(on):
    for gpu in GPUS:
        topology = on(gpu, precision="bf16")
        assert describe_precision(topology, "single") == [], gpu
        problems = check_precision(topology)
        assert bool(problems) != GPUS[gpu], gpu
        for problem in problems:
            assert str(problem).startswith(f"mixed_precision: bf16, which {gpu} does not have; expected no"), gpu
            assert problem.fix == FLOAT32, gpu


def test_one_gpu_without_bf16_decides_for_all_that_the_run_uses(on, monkeypatch):
    topology = replace(on("NVIDIA A10G", DDP, "bf16"), num_processes=2)
    with_gpus(monkeypatch, ("NVIDIA A10G", 8), ("Tesla T4", 7))
    (problem,) = check_precision(topology)
    assert "bf16, which Tesla T4 does not have" in problem.found
    assert check_precision(replace(topology, num_processes=1)) == []  # it runs on the first one
