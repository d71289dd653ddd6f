"""Check the precision of a run: GPUs without bf16 or FP8, and float32 where bf16 would be faster.

Promises: a run in float32 on a GPU reports that, with the reason and the remedy. On a CPU nothing is reported.
"""

from kit.config.settings.method import MethodSettings
from kit.strategy.topology import Topology, gpus_of
from kit.system.errors import Problem

FLOAT32 = "float32: `accelerate launch --mixed_precision no` without --config, or mixed_precision: no in a copy of it"
_BF16_FROM = 8  # major compute capability
_FP8_FROM = (8, 9)


def check_precision(topology: Topology) -> list[Problem]:
    """Return a problem if the run uses bf16, and torch would emulate it on one of its GPUs."""
    without = _gpu_without_bf16(topology)
    if topology.mixed_precision != "bf16" or not without:
        return []
    return [Problem("mixed_precision", f"bf16, which {without} does not have", "no", FLOAT32)]


def describe_precision(topology: Topology, config: str | None) -> list[str]:
    """Return a line for a run in float32 on a GPU: why, and what is faster. Else nothing.

    Args:
        config: as the command names it; None if the precision is the launcher's, which is float32 by default.
    """
    if topology.mixed_precision != "no" or topology.device_type == "cpu":
        return []
    if without := _gpu_without_bf16(topology):
        return [f"computes in float32: {without} has no bf16, and fp16 is not supported"]
    change = f"mixed_precision: bf16 in {config}" if config else f"--config {topology.strategy.config}"
    return [f"computes in float32, as mixed_precision is no: bf16 is faster, with less memory: {change}"]


def _gpu_without_bf16(topology: Topology) -> str:
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
        found = "needs mixed_precision: bf16, and the run computes in float32"
    if not settings.fp8 or not found:
        return []
    return [Problem("fp8", found, fix=f"--fp8 false; or --config {topology.strategy.config} with bf16")]
