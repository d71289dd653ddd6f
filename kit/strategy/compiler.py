"""Whether a run compiles its layers, and whether it can. Imports no torch."""

from importlib.util import find_spec

from kit.config.conflicts import find_conflicts
from kit.config.recipe import Recipe
from kit.strategy.precision import gpu_without_bf16
from kit.strategy.topology import Topology, gpus_of
from kit.system.errors import Problem

# Compiling takes minutes, the first time. Then it saves about a fifth of a step, 0.08 s for each row of 4,096 tokens of
# 8B `lora` on an H100: two minutes in so many. All samples of the run count, also those before a resume: so that run
# has the same graphs, which torch's cache holds, and the same bits.
_FEWEST_SAMPLES = 1500  # of a GPU


def why_not_by_default(recipe: Recipe, topology: Topology, num_steps: int) -> str:
    """Return why ``auto`` compiles nothing, whatever the model; empty if it compiles.

    It does where a gain was measured: on an H100 a step of 8B `lora` took 0.78 of the time, and one of 1B `full`, which
    is bound by the host, 0.8 to 0.9.

    Args:
        num_steps: of the run; 0: not known.
    """
    num_samples = num_steps * recipe.global_batch_size // topology.num_data_ranks
    if not gpus_of(topology):
        return f"it was measured on NVIDIA GPUs only, not on {topology.device_type}"
    if older := gpu_without_bf16(topology):  # without a kernel for packs, too, and not measured
        return f"{older} is older than Ampere"
    asked = recipe.model_copy(update={"torch_compile": True})
    if problems := [*compile_problems(topology), *find_conflicts(asked, {}, set())]:
        return problems[0].found
    if recipe.method == "qlora" and topology.strategy.shards:
        return "4-bit layers under FSDP2 are not one graph"
    if recipe.packing and topology.mixed_precision == "no":
        return "packs in float32 have no kernel"
    if 0 < num_samples < _FEWEST_SAMPLES:
        return f"{num_samples:,} samples per GPU do not repay the minutes that it takes"
    return ""


def compile_problems(topology: Topology) -> list[Problem]:
    """Return a problem if the strategy, or the device, cannot compile. Other problems torch reports itself."""
    if topology.strategy.name == "fsdp1":
        found, fix = "not supported with FSDP1, which wraps the adapters inside layers", "--config fsdp"
    elif topology.device_type == "mps":
        found, fix = "not tested on MPS", "use a CUDA GPU"
    elif topology.device_type == "cuda" and find_spec("triton") is None:
        found, fix = "needs triton, which is not installed", "pip install triton"
    else:
        return []
    return [Problem("torch_compile", found, fix=f"{fix}; or --torch_compile false")]
