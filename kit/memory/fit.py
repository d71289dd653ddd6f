"""Whether a run that is about to start fits its GPUs: the settings that are ``auto``, and a refusal if it cannot fit.

Promises: a run is refused only if its tensors alone are larger than a GPU, by more than the formulas may be wrong. What
they do not describe is never refused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kit.config.recipe import Recipe
from kit.errors import Problem, UserError
from kit.memory.families import shape_of
from kit.memory.formulas import Memory, predict
from kit.memory.operations import operations_per_token
from kit.memory.workload import Workload, uncovered
from kit.strategy.topology import Topology

GIB = 2**30
# Of a GPU's memory, that a plan leaves free: so far the formulas may be wrong.
MARGIN = 0.05
# Of a micro-batch. Beyond this, larger products are hardly faster, and a longer step only takes more memory.
ENOUGH_TOKENS = 16384


def settle(recipe: Recipe, topology: Topology, config: Any) -> Recipe:
    """Return the recipe with a value for each setting that is ``auto``: what is best on the GPUs of this machine.

    Neither setting changes the maths. On a CPU, and where nothing fits, the micro-batch is 1. Checkpointing is off on a
    CPU, and on where nothing else fits or nothing is known.
    """
    rows = None if recipe.per_device_train_batch_size == "auto" else recipe.per_device_train_batch_size
    checkpointing = None if recipe.gradient_checkpointing == "auto" else recipe.gradient_checkpointing
    if rows is not None and checkpointing is not None:
        return recipe
    total = gpu_memory(topology)
    chosen_rows, chosen_checkpointing = rows or 1, total is not None if checkpointing is None else checkpointing
    workload = planned(recipe, topology, config)
    best = None
    if total is not None and workload is not None:
        best = choose(workload, lambda way: fits(way, total), recipe.global_batch_size, checkpointing, rows)
    if best is not None:
        chosen_rows, chosen_checkpointing = best.rows, best.gradient_checkpointing
    chosen = {"per_device_train_batch_size": chosen_rows, "gradient_checkpointing": chosen_checkpointing}
    return recipe.model_copy(update=chosen)


def fits(workload: Workload, total: int) -> bool:
    """Return whether a GPU of ``total`` bytes is enough, with ``MARGIN`` of them left free."""
    return predict(workload).peak <= int((1 - MARGIN) * total)


def choose(
    workload: Workload,
    fits: Callable[[Workload], bool],
    global_batch_size: int,
    checkpointing: bool | None = None,
    rows: int | None = None,
) -> Workload | None:
    """Return ``workload`` with checkpointing only if it must be, and the largest micro-batch that fits and is useful.

    Args:
        checkpointing: whether it must be on or off; None: as it is best.
        rows: what the micro-batch must be; None: as it is best.

    Returns None if nothing fits.
    """
    share = max(1, global_batch_size // workload.num_gpus)
    for on in (False, True) if checkpointing is None else (checkpointing,):
        way = replace(workload, gradient_checkpointing=on)
        enough = max(way.rows, ENOUGH_TOKENS // way.length)
        sizes = [rows] if rows is not None else [n for n in range(min(enough, share), 0, -1) if share % n == 0]
        for size in sizes:
            sized = replace(way, rows=size, micro_batches=max(1, share // size))
            if fits(sized):
                return sized
    return None


def explain_auto(recipe: Recipe, settled: Recipe, topology: Topology, config: Any) -> list[str]:
    """Return a line that says what ``settle`` took without a plan, and why; none on a CPU, and where a plan chose."""
    rows, checkpointing = settled.micro_batch_size, "on" if settled.gradient_checkpointing else "off"
    taken = [f"micro-batch {rows}"] if recipe.per_device_train_batch_size == "auto" else []
    taken += [f"gradient checkpointing {checkpointing}"] if recipe.gradient_checkpointing == "auto" else []
    memory, workload = gpu_memory(topology), planned(settled, topology, config)
    if memory is None or not taken:
        return []
    if workload is None:
        return [f"auto: no plan for {_unknown(recipe, topology, config)}: {', '.join(taken)}"]
    if not fits(workload, memory):
        return [f"auto: nothing fits by the plan: {', '.join(taken)}"]
    return []


def gpu_memory(topology: Topology) -> int | None:
    """Return the bytes of the smallest GPU of this machine; None if the run does not use GPUs."""
    if topology.device_type != "cuda":
        return None
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(sizes, default=None)


def planned(recipe: Recipe, topology: Topology, config: Any) -> Workload | None:
    """Return what the run does as a workload; None if the formulas do not describe it.

    Args:
        config: the model's config, as transformers opened it.
    """
    if _unknown(recipe, topology, config):
        return None
    shape = shape_of(config.to_dict(), recipe.model_name_or_path)
    num_gpus, num_replicas = topology.num_processes, topology.num_replicas
    workload = Workload.of(recipe, shape, topology.strategy, num_gpus, num_replicas=num_replicas)
    return replace(workload, bf16=topology.mixed_precision == "bf16")


def _unknown(recipe: Recipe, topology: Topology, config: Any) -> str:
    """What of the run the formulas do not describe; empty if they describe all of it."""
    found = [f"--{key}" for key in uncovered(recipe)]
    if topology.strategy.name == "fsdp1":
        found.append(topology.strategy.name)
    elif not topology.reshard_after_forward:
        found.append("weights that stay gathered")
    if topology.strategy.shards and recipe.method == "qlora" and not topology.load_on_rank0:
        found.append("a whole model in 4 bits on each GPU while it is loaded")
    try:
        shape_of(config.to_dict(), recipe.model_name_or_path)
    except UserError:
        found.append(f"a model of type {config.to_dict().get('model_type')!r}")
    return ", ".join(found)


def record(workload: Workload | None, topology: Topology) -> dict[str, Any]:
    """The entry ``plan`` of ``run.json``, to compare with what is measured. Empty on a CPU, and where nothing is known.

    Bytes of one GPU, and operations per token of forward and backward pass without recomputation.
    """
    if workload is None or topology.device_type != "cuda":
        return {}
    memory = predict(workload)
    model = replace(workload, gradient_checkpointing=False, loss="whole")
    return {
        "tensors": memory.tensors,
        "peak": memory.peak,
        "components": memory.components,
        "operations_per_token": operations_per_token(model),
    }


def memory_problems(workload: Workload | None, topology: Topology) -> list[Problem]:
    """Return a problem if the run cannot fit the GPUs of this machine."""
    total = gpu_memory(topology)
    if total is None or workload is None:
        return []
    memory = predict(workload)
    if memory.tensors * (1 - MARGIN) <= total:
        return []
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
    return [Problem("memory", found, fix=fix)]


def _largest(memory: Memory) -> str:
    """The three largest components as text."""
    largest = sorted(memory.components.items(), key=lambda entry: -entry[1])[:3]
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
