"""Products of 8 bits, a kernel that a run may ask for and that only some GPUs have.

Promises: a run that asks for it on a GPU that does not have it ends with the reason, before weights are read. No other
kernel takes its place. A CPU rehearses it, at whatever speed.
"""

from kit.config.settings.method import MethodSettings
from kit.strategy.topology import Topology, gpus_of
from kit.system.errors import Problem

_FP8_FROM = (8, 9)  # compute capability


def check_kernels(settings: MethodSettings, topology: Topology) -> list[Problem]:
    """Return a problem if the settings ask for products of 8 bits and the run cannot have them."""
    if not settings.fp8 or not (found := _why_not_fp8(topology)):
        return []
    return [Problem("fp8", found, fix=f"--fp8 false; or --config {topology.strategy.config} with bf16")]


def _why_not_fp8(topology: Topology) -> str:
    """Why this run cannot have products of 8 bits; empty if it can."""
    gpus = gpus_of(topology)
    if topology.device_type != "cpu" and not gpus:
        return f"needs NVIDIA GPUs, and the run is on {topology.device_type}"
    if old := next((gpu for gpu in gpus if (gpu.major, gpu.minor) < _FP8_FROM), None):
        lowest = ".".join(map(str, _FP8_FROM))
        return f"needs GPUs of compute capability {lowest} or above, and {old.name} has {old.major}.{old.minor}"
    if topology.strategy.name == "fsdp1":
        return "under FSDP1, with which it was never run"
    return "" if topology.mixed_precision == "bf16" else "needs mixed_precision: bf16, and the run computes in float32"
