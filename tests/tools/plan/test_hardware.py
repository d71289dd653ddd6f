"""GPUs by name or memory; unknown GPUs are reported."""

import math
from types import SimpleNamespace

import pytest

from kit.memory.host import host_memory
from kit.system.errors import UserError
from kit.tools.plan import hardware
from kit.tools.plan.hardware import GIB, GPUS, parse_gpu, parse_gpus, this_machine


def test_a_gpu_is_a_name_or_a_memory_with_its_unit():
    for texts, key in (
        ("H100 | H100-SXM5 | NVIDIA H100 80GB HBM3", "h100"),
        ("rtx 4090 | 4090 | GeForce RTX 4090", "rtx4090"),
        ("a100-40 | a100 40GB", "a100-40"),
    ):
        assert [parse_gpu(text) for text in texts.split(" | ")] == [(GPUS[key], 1, 1)] * len(texts.split(" | ")), key
    for text, memory in (("24GiB", 24 * GIB), ("80GB", 80 * 10**9), ("81920MiB", 80 * GIB), ("L40 48GB", 48 * 10**9)):
        gpu, *_ = parse_gpu(text)
        assert (gpu.name, gpu.memory, gpu.is_known) == (text, memory, False)
    for text, numbers in (("2xrtx4090", [2, 2]), ("8 x H100", [8, 8]), ("16x80GB", [16, 8])):
        assert [*parse_gpu(text)[1:]] == numbers
    for text in ("24", "h10", "L40", "8x", "a4000", "3060 ti"):  # of no other card either
        with pytest.raises(UserError, match="a memory with its unit"):
            parse_gpu(text)


def test_gpus_are_a_number_or_machines_times_gpus():
    assert [parse_gpus(text) for text in ("1", "8", "64", "4x2")] == [(1, 1), (8, 8), (64, 8), (8, 2)]
    for text in ("0", "2x", "8x0"):
        with pytest.raises(UserError, match="--gpus"):
            parse_gpus(text)


def test_this_machines_gpus_are_those_of_its_driver(monkeypatch):
    def driver(text):
        monkeypatch.setattr(hardware.subprocess, "run", lambda *words, **options: SimpleNamespace(stdout=text))
        return this_machine()

    gpu, count = driver("NVIDIA H100 80GB HBM3, 81559, 9.0\nNVIDIA H100 80GB HBM3, 81559, 9.0\n")
    assert gpu.host == host_memory()[0] and math.isinf(GPUS["h100"].host)
    assert (count, gpu.memory, gpu.tflops) == (2, 81559 * 2**20, GPUS["h100"].tflops)
    gpu, _ = driver("NVIDIA GeForce RTX 4090, 24564, 8.9\nNVIDIA RTX 1, 8000, 8.9\n")
    assert not gpu.is_known and gpu.memory == 8000 * 2**20  # all ranks need what the smallest one has
    assert not driver("NVIDIA RTX 1, 8000, 8.6\nTesla T4, 15360, 7.5\n")[0].bf16  # the smaller one has it
    gpu, _ = driver("Tesla P100-PCIE-16GB, 16384, 6.0\n")  # which has no tensor cores
    assert not gpu.bf16 and not gpu.is_known
    assert driver("NVIDIA X, [N/A], 8.0\n") is None
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    assert this_machine() is None
