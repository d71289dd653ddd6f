"""The precision of a run: GPUs without bf16 or FP8, what fp16 excludes, and float32 where half precision is faster.

Promises: where a GPU has no bf16, a run that asks for it computes in fp16 and says so; nothing is emulated. A run in
float32 on a GPU reports that, with the remedy. On a CPU nothing is reported.
"""

from dataclasses import replace

from kit.config.settings.method import MethodSettings
from kit.strategy.strategies import Strategy
from kit.strategy.topology import Precision, Topology, gpus_of
from kit.system.errors import Problem

_BF16_FROM = 8  # major compute capability
_FP8_FROM = (8, 9)


def supported_precision(topology: Topology) -> tuple[Topology, list[str]]:
    """Return the topology with fp16 in place of bf16 if one of the run's GPUs has no bf16, and a line that says so."""
    without = gpu_without_bf16(topology)
    if topology.mixed_precision != "bf16" or not without:
        return topology, []
    line = f"mixed_precision: fp16, in place of bf16, which {without} does not have"
    return replace(topology, mixed_precision="fp16"), [line]


def check_precision(optim: str, strategy: Strategy, precision: Precision) -> list[Problem]:
    """Return the problems of an optimiser and a strategy with the precision."""
    problems = []
    if optim == "adamw_bf16" and precision != "bf16":
        found = f"adamw_bf16 with mixed_precision {precision}: bf16 weights give bf16 matmuls"
        fix = f"--config {strategy.config}, on GPUs with bf16; or --optim adamw_torch"
        problems.append(Problem("optim", found, fix=fix))
    if precision == "fp16" and strategy.name == "fsdp1":
        found = "fp16 under FSDP1, which clips gradients before the loss scale is divided out"
        problems.append(Problem("mixed_precision", found, fix="--config fsdp"))
    return problems


def describe_precision(topology: Topology, config: str | None) -> list[str]:
    """Return a line for a run in float32 on a GPU: why, and what is faster. Else nothing.

    Args:
        config: as the command names it; None if the precision is the launcher's, which is float32 by default.
    """
    if topology.mixed_precision != "no" or topology.device_type == "cpu":
        return []
    faster = "fp16" if gpu_without_bf16(topology) else "bf16"
    change = f"mixed_precision: {faster} in {config}" if config else f"--config {topology.strategy.config}"
    return [f"computes in float32, as mixed_precision is no: {faster} is faster, with less memory: {change}"]


def gpu_without_bf16(topology: Topology) -> str:
    """The name of the first GPU of the run on this machine that would emulate bf16; empty if all have it.

    A CPU may emulate bf16 (dry run). Macs have it: torch needs macOS 14.
    """
    return next((gpu.name for gpu in gpus_of(topology) if gpu.major < _BF16_FROM), "")


def check_fp8(settings: MethodSettings, topology: Topology) -> list[Problem]:
    """Return a problem if ``fp8`` is on and the run cannot have FP8 matmuls. There is no fallback.

    A CPU emulates them (dry run).
    """
    gpus, found = gpus_of(topology), ""
    if topology.device_type != "cpu" and not gpus:
        found = f"needs NVIDIA GPUs, and the run is on {topology.device_type}"
    elif old := next((gpu for gpu in gpus if (gpu.major, gpu.minor) < _FP8_FROM), None):
        lowest = ".".join(map(str, _FP8_FROM))
        found = f"needs GPUs of compute capability {lowest} or above, and {old.name} has {old.major}.{old.minor}"
    elif topology.strategy.name == "fsdp1":
        found = "not tested with FSDP1"
    elif topology.mixed_precision != "bf16":
        found = f"needs mixed_precision: bf16, and the run computes in {topology.compute_dtype}"
    if not settings.fp8 or not found:
        return []
    return [Problem("fp8", found, fix=f"--fp8 false; or --config {topology.strategy.config} with bf16")]
