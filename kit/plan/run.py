"""The plan of a run that is about to start: its memory in a line, and a refusal if it cannot fit.

Promises: a run is refused only if its tensors alone are larger than a GPU, by more than the formulas may be wrong. What
they do not describe is never refused.
"""

from dataclasses import replace
from typing import Any

from kit.config.recipe import Recipe
from kit.errors import Problem, UserError
from kit.plan.memory import Memory, predict
from kit.plan.models import shape_of
from kit.plan.workload import Strategy, Workload, uncovered
from kit.strategy.topology import Topology

GIB = 2**30
# Of the sum of tensors. Compared with simulations, the formulas are wrong by less than this.
MARGIN = 0.05


def planned(recipe: Recipe, topology: Topology, config: Any) -> Workload | None:
    """Return what the run does as a workload; None if the formulas do not describe it.

    Args:
        config: the model's config, as transformers opened it.
    """
    strategies: dict[str, Strategy] = {"single": "single", "ddp": "ddp", "fsdp2": "fsdp2"}
    if topology.strategy not in strategies or not topology.reshard_after_forward or uncovered(recipe):
        return None
    try:
        shape = shape_of(config.to_dict(), recipe.model_name_or_path)
    except UserError:
        return None
    strategy = "offload" if topology.offload else strategies[topology.strategy]
    workload = Workload.of(recipe, shape, strategy, topology.num_processes)
    return replace(workload, bf16=topology.mixed_precision == "bf16")


def record_memory(workload: Workload | None) -> dict[str, Any]:
    """The entry ``planned_memory`` of ``run.json``: bytes of one GPU, to compare with the measured peak."""
    if workload is None:
        return {}
    memory = predict(workload)
    return {"tensors": memory.tensors, "peak": memory.peak, "components": memory.components}


def describe_memory(workload: Workload | None) -> list[str]:
    """Describe the memory that the run would take of each GPU, and of the host and the disk, in one line."""
    if workload is None:
        return []
    memory = predict(workload)
    host, disk = (sum(sizes.values()) / GIB for sizes in (memory.host, memory.disk))
    return [
        f"planned memory: {memory.peak / GIB:.1f} GiB of each GPU ({_largest(memory)}), {host:.1f} GiB of a machine, "
        f"{disk:.1f} GiB on disk; by formulas, `kit plan` says more"
    ]


def check_memory(workload: Workload | None, topology: Topology) -> None:
    """Raise ``UserError`` if the run cannot fit the GPUs of this machine."""
    if topology.device_type != "cuda" or workload is None:
        return
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    memory = predict(workload)
    if not sizes or memory.tensors * (1 - MARGIN) <= min(sizes):
        return
    total = min(sizes)
    found = (
        f"the run needs about {memory.peak / GIB:.1f} GiB of each GPU ({_largest(memory)}), a GPU has {total / GIB:.1f}"
    )
    less = replace(workload, gradient_checkpointing=True)
    fix = f"`kit plan --gpu {total // 2**20}MiB` with the same flags says what fits"
    if predict(less).peak <= total:
        fix = "--gradient_checkpointing true: the same maths, in more time"
    elif workload.rows > 1 and predict(replace(less, rows=1)).peak <= total:
        fix = "--gradient_checkpointing true --per_device_train_batch_size 1: the same maths, in more time"
    fix += "; --skip_memory_check true starts it all the same"
    raise UserError(Problem("memory", found, fix=fix))


def _largest(memory: Memory) -> str:
    """The three largest components as text."""
    largest = sorted(memory.components.items(), key=lambda entry: -entry[1])[:3]
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
