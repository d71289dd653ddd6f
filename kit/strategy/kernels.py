"""Kernels that a run may ask for by name and that only some GPUs have: FlashAttention 3, and products of 8 bits.

Promises: a run that asks for one that a GPU of it does not have ends with the reason, before weights are read. No other
takes its place. A CPU rehearses products of 8 bits, at whatever speed.
"""

from importlib.util import find_spec

from kit.config.settings.method import MethodSettings
from kit.errors import Problem
from kit.strategy.topology import Topology, gpus_of

_FP8_FROM = (8, 9)  # compute capability
_HOPPER = 9  # major compute capability; FlashAttention 3 is written for this one only


def check_kernels(settings: MethodSettings, topology: Topology) -> list[Problem]:
    """Return a problem for each kernel that the settings ask for and the run cannot have."""
    problems = []
    if settings.attn_implementation == "flash_attention_3" and (found := _why_not_flash_attention_3(topology)):
        problems.append(Problem("attn_implementation", f"flash_attention_3, {found}", fix="--attn_implementation auto"))
    if settings.fp8 and (found := _why_not_fp8(topology)):
        problems.append(Problem("fp8", found, fix=f"--fp8 false; or --config {topology.strategy.config} with bf16"))
    return problems


def _why_not_flash_attention_3(topology: Topology) -> str:
    """Why this run cannot have FlashAttention 3; empty if it can."""
    if other := next((gpu.name for gpu in gpus_of(topology) if gpu.major != _HOPPER), ""):
        return f"which needs Hopper GPUs (H100, H200), and there is {other}"
    if not gpus_of(topology):
        return f"which needs a Hopper GPU (H100, H200), and the run is on {topology.device_type}"
    if topology.mixed_precision != "bf16":
        return "which needs mixed_precision: bf16"
    if find_spec("flash_attn_interface") is None:
        # What pip installs under this name is empty.
        return "whose package is not installed: it is built from the folder hopper of Dao-AILab/flash-attention"
    return ""


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
