"""A run in float32 on a GPU reports that with a remedy; where bf16 is missing, fp16 takes its place in a line.

The GPUs are torch's answers about them. No number of a T4 was measured.
"""

from dataclasses import replace

import pytest
from helpers import with_gpus

from kit.strategy.precision import check_precision, describe_precision, supported_precision
from kit.strategy.strategies import DDP, FSDP1, FSDP2, HYBRID, SINGLE
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
        faster = "bf16" if has_bf16 else "fp16"
        assert without_config.startswith("computes in float32") and f"{faster} is faster" in without_config, gpu
        assert without_config.endswith("--config fsdp_hybrid"), gpu
        assert with_config.endswith(f"mixed_precision: {faster} in mine.yaml"), gpu
        assert supported_precision(topology) == (topology, []), gpu  # what was asked for


def test_fp16_takes_the_place_of_bf16_where_torch_would_emulate_it_and_a_line_says_so(on):
    for gpu, has_bf16 in GPUS.items():
        topology, lines = supported_precision(on(gpu, precision="bf16"))
        assert topology.mixed_precision == ("bf16" if has_bf16 else "fp16") and describe_precision(topology, None) == []
        assert has_bf16 == (not lines), gpu
        for line in lines:
            assert line.startswith("mixed_precision: fp16") and f"in place of bf16, which {gpu} does not have" in line


def test_one_gpu_without_bf16_decides_for_all_that_the_run_uses(on, monkeypatch):
    topology = replace(on("NVIDIA A10G", DDP, "bf16"), num_processes=2)
    with_gpus(monkeypatch, ("NVIDIA A10G", 8), ("Tesla T4", 7))
    assert supported_precision(topology)[0].mixed_precision == "fp16"
    assert supported_precision(replace(topology, num_processes=1))[1] == []  # it runs on the first one


def test_what_does_not_go_with_fp16_is_refused():
    for strategy in (SINGLE, DDP, FSDP2):
        assert check_precision("adamw_torch_fused", strategy, "fp16") == []
    (problem,) = check_precision("adamw_bf16", FSDP2, "fp16")
    assert "adamw_bf16 with mixed_precision fp16" in problem.found and "--config fsdp" in problem.fix
    (problem,) = check_precision("adamw_torch", FSDP1, "fp16")
    assert "fp16 under FSDP1" in problem.found and problem.fix == "--config fsdp"
