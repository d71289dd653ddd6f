"""GPUs by name or memory; what is no GPU is reported."""

import math
from types import SimpleNamespace

import pytest

from kit.errors import UserError
from kit.tools.plan import hardware
from kit.tools.plan.hardware import GIB, GPUS, host_memory, parse_gpu, parse_gpus, parse_parameters, this_machine


@pytest.mark.parametrize("text", ["h100", "H100", "NVIDIA H100", "h100-sxm"])
def test_a_gpu_has_several_spellings(text):
    assert parse_gpu(text) is GPUS["h100"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("GeForce RTX 4090 24GB", "rtx4090"),
        ("3060", "rtx3060"),
        ("t4", "t4"),
        ("Tesla T4", "t4"),
        ("V100", "v100"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("a100", "a100"),
        ("a100-80g", "a100"),
        ("A100 80GB", "a100"),
        ("A100-SXM4-40GB", "a100-40"),
        ("h100 sxm", "h100"),
        ("H100-SXM5-80GB", "h100"),
        ("h100 pcie", "h100-pcie"),
        ("l4", "l4"),
        ("L40S 48GB", "l40s"),
        ("mi300x", "mi300x"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_found_as_people_type_it(text, key):
    assert parse_gpu(text) is GPUS[key]


def test_gpus_without_bf16_have_the_speed_and_the_plan_of_float32():
    """8.1 and 15.7 TFLOP/s of float32 are in NVIDIA's datasheets of T4 and V100; their bf16 would be emulated."""
    assert {key for key, gpu in GPUS.items() if not gpu.bf16} == {"t4", "v100", "v100-32", "v100-pcie"}
    assert (GPUS["t4"].tflops, GPUS["v100"].tflops) == (8.1, 15.7)


@pytest.mark.parametrize(("text", "memory"), [("24GiB", 24 * GIB), ("80GB", 80 * 10**9), ("81920MiB", 80 * GIB)])
def test_a_memory_with_its_unit_is_a_gpu_of_unknown_speed(text, memory):
    gpu = parse_gpu(text)
    assert (gpu.memory, gpu.is_known) == (memory, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("24", "a memory without a unit"),
        ("0GiB", "no GPU has so much memory"),
        ("9999GiB", "no GPU has so much memory"),
        ("h10", "-> --gpu h100"),
        ("l40", "-> --gpu l40s"),
        ("a1000", "-> --gpu a100, or --gpu a100-40"),
        ("m2", "the machine's is shared"),
        ("-3GiB", "no GPU '-3GiB'"),
        ("A100 60GB", "no GPU 'A100 60GB'"),
        ("Tesla P100", "-> --gpu t4 plans in float32"),
        ("RTX 2080 Ti", "has no bf16"),
        ("gtx1080", "has no bf16"),
    ],
)
def test_what_is_no_gpu_is_reported(text, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        parse_gpu(text)


@pytest.mark.parametrize(("text", "gpus"), [("1", (1, 1)), ("8", (8, 8)), ("64", (64, 8)), ("4x2", (8, 2))])
def test_gpus_are_a_number_or_machines_times_gpus(text, gpus):
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize("text", ["0", "-1", "two", "2x", "0x8", "3x0", "1000000", "1e3", "2.5"])
def test_an_absurd_number_of_gpus_is_reported(text):
    with pytest.raises(UserError, match="--gpus"):
        parse_gpus(text)


def test_parameters_have_a_unit():
    assert (parse_parameters("8B"), parse_parameters("350m"), parse_parameters("1.5b")) == (8e9, 350e6, 1.5e9)
    for text in ("8", "B", "0B", "9999T", "-8B"):
        with pytest.raises(UserError, match="--params"):
            parse_parameters(text)


def test_this_machines_gpus_are_those_of_its_driver(monkeypatch):
    monkeypatch.setattr(hardware.shutil, "which", lambda name: name)

    def driver(text):
        """The driver prints ``text`` for columns of their number, and refuses others, as old ones do."""

        def run(words, **options):
            columns = words[1].count(",")
            if any(line.count(",") != columns for line in text.splitlines()):
                raise hardware.subprocess.CalledProcessError(2, words)
            return SimpleNamespace(stdout=text)

        monkeypatch.setattr(hardware.subprocess, "run", run)
        return this_machine()

    gpu, count = driver("NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\n")
    assert gpu.host == host_memory()[0] and math.isinf(GPUS["h100"].host)
    assert (count, gpu.memory, gpu.tflops) == (2, 81559 * 2**20, GPUS["h100"].tflops)
    gpu, _ = driver("NVIDIA A100-SXM4-40GB, 40960\n")
    assert gpu.bandwidth == GPUS["a100-40"].bandwidth
    gpu, _ = driver("NVIDIA GeForce RTX 4090, 24564\nNVIDIA RTX 1, 8000\n")
    assert not gpu.is_known and gpu.memory == 8000 * 2**20  # all ranks need what the smallest one has
    gpu, _ = driver("NVIDIA H100 PCIe, 81559, 9.0\n")
    assert gpu.bf16 and gpu.tflops == GPUS["h100-pcie"].tflops
    assert not driver("Tesla T4, 15360, 7.5\n")[0].bf16 and not driver("Tesla T4, 15360\n")[0].bf16
    assert not driver("Quadro RTX 5000, 16384, 7.5\n")[0].bf16  # no name that is known here
    assert not driver("NVIDIA A10, 22731, 8.6\nTesla T4, 15360, 7.5\n")[0].bf16
    assert not driver("NVIDIA RTX 1, 8000, 8.6\nTesla T4, 15360, 7.5\n")[0].bf16  # the smaller one has it
    assert driver("") is None and driver("NVIDIA X, [N/A]\n") is None
    monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    assert this_machine() is None


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    whole, free = host_memory()
    assert whole >= free > 1000
    (tmp_path / "memory.current").write_text("200\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert host_memory() == (1000, 800)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory()[0] == whole
