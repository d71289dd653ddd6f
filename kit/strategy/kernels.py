"""Kernels that a run may ask for by name and that only some GPUs have.

Promises: a run that asks for one that a GPU of it does not have ends with the reason, before weights are read. No other
takes its place.
"""

from importlib.util import find_spec

from kit.config.recipe import Recipe
from kit.errors import Problem
from kit.strategy.topology import Topology, gpus_of

_HOPPER = 9  # major compute capability; FlashAttention 3 is written for this one only


def check_kernels(recipe: Recipe, topology: Topology) -> list[Problem]:
    """Return a problem for each kernel that the recipe asks for and the run cannot have."""
    problems = []
    if recipe.attn_implementation == "flash_attention_3" and (found := _why_not_flash_attention_3(topology)):
        problems.append(Problem("attn_implementation", f"flash_attention_3, {found}", fix="--attn_implementation auto"))
    return problems


def describe_kernels(recipe: Recipe) -> list[str]:
    """Return a line for each of these kernels that the run uses."""
    if recipe.attn_implementation != "flash_attention_3":
        return []
    return [
        "attention: FlashAttention 3, of the package flash_attn_interface; no result of this kit was measured with it"
    ]


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
