"""Whether a run fits its GPUs and its disk: values for ``auto``, and a refusal if it cannot fit.

Promises: a run is refused only if its tensors alone are larger than a GPU, by more than the formulas may be wrong. What
they do not cover is never refused.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.config.recipe import Recipe
from kit.memory.families import shape_of
from kit.memory.formulas import predict
from kit.memory.host import host_memory
from kit.memory.operations import operations_per_token, without_recomputation
from kit.memory.shape import Shape
from kit.memory.sizes import format_bytes, num_checkpoints
from kit.memory.workload import Workload, uncovered
from kit.model.layers.checkpointing import Checkpointing
from kit.strategy.topology import Topology, gpu_memory
from kit.system.errors import Problem, UserError

GIB = 2**30
# Share of a GPU's memory that a plan leaves free: by this much the formulas may be wrong.
MARGIN = 0.05
# Tokens of a micro-batch beyond which larger products are hardly faster, and only take more memory.
ENOUGH_TOKENS = 16384
FOR_TEACHER = (
    "--teacher_in_4bit true quantises the teacher; --teacher_top_k 64 (offline distillation) frees it before training"
)
# No formula has what they take; without them a checkpoint is smaller.
ONLY_ADDED = ("lora_modules_to_save", "trainable_tokens", "new_tokens", "use_dora")
# From the fastest to the one that takes the least memory.
CHECKPOINTING: tuple[Checkpointing, ...] = (False, "selective", True)


def resolve_auto(recipe: Recipe, topology: Topology, config: Any, teacher: Any = None) -> tuple[Recipe, list[str]]:
    """Return the recipe with a value for each setting that is ``auto``: the best one on the GPUs of this machine.

    Neither setting changes the maths. On a CPU half of the machine's memory counts, also where the formulas do not
    describe all that trains: the parts that they lack do not grow with the micro-batch. Where nothing fits, or without
    a plan, the micro-batch is 1, and checkpointing is on, not selective; on a CPU it is off.

    Args:
        config: the model's config, as transformers opened it.
        teacher: the teacher's, or None.

    Returns:
        The recipe; and a line that says what was taken without a plan, and why. There is none on a CPU.
    """
    rows = None if recipe.per_device_train_batch_size == "auto" else recipe.per_device_train_batch_size
    checkpointing = None if recipe.gradient_checkpointing == "auto" else recipe.gradient_checkpointing
    if rows is not None and checkpointing is not None:
        return recipe, []
    total = gpu_memory(topology)
    on_cpu = topology.device_type == "cpu"
    workload, unknown = _described(recipe, topology, config, teacher)
    room = total or 0
    if workload and on_cpu:  # the other half is for other programs
        room = host_memory()[0] // 2 // min(workload.num_gpus, workload.gpus_per_machine)
    if workload and room and (on_cpu or not unknown):
        most = int((1 - MARGIN) * room)
        best = choose(workload, lambda way: predict(way).peak <= most, recipe.global_batch_size, checkpointing, rows)
        if best is not None:
            update = {"per_device_train_batch_size": best.rows, "gradient_checkpointing": best.gradient_checkpointing}
            return recipe.model_copy(update=update), []
    taken: dict[str, Any] = {"per_device_train_batch_size": 1} if rows is None else {}
    words = [f"micro-batch {size}" for size in taken.values()]
    if checkpointing is None:
        taken["gradient_checkpointing"] = not on_cpu
        words.append(f"gradient checkpointing {checkpointing_word(taken['gradient_checkpointing'])}")
    why = f"no plan for {unknown}" if unknown else "nothing fits by the plan"
    return recipe.model_copy(update=taken), [f"auto: {why}: {', '.join(words)}"] if total is not None else []


def choose(
    workload: Workload,
    fits: Callable[[Workload], bool],
    global_batch_size: int,
    checkpointing: Checkpointing | None = None,
    rows: int | None = None,
) -> Workload | None:
    """Return ``workload`` with the largest useful micro-batch that fits, and the first of ``CHECKPOINTING`` that does.

    A micro-batch of more than ``ENOUGH_TOKENS`` is not useful. Returns None if nothing fits.

    Args:
        checkpointing: None: the first that fits, with whatever micro-batch.
        rows: of the micro-batch; None: the best number.
    """
    share = max(1, global_batch_size // workload.num_data_ranks)
    enough = max(workload.rows, ENOUGH_TOKENS * workload.sequence_parallel_size // workload.sample_tokens)
    sizes = [rows] if rows is not None else [n for n in range(min(enough, share), 0, -1) if share % n == 0]
    for how in CHECKPOINTING if checkpointing is None else (checkpointing,):
        for size in sizes:
            micro_batches = max(1, share // size)
            # Without a size of its own, a call writes as many answers as a micro-batch has.
            written = size if workload.generated_rows == workload.rows else workload.generated_rows
            candidate = replace(
                workload, gradient_checkpointing=how, rows=size, micro_batches=micro_batches, generated_rows=written
            )
            if fits(candidate):
                return candidate
    return None


def checkpointing_word(how: bool | str) -> str:
    """Return ``on``, ``off`` or ``selective``."""
    return how if isinstance(how, str) else "on" if how else "off"


def planned_workload(recipe: Recipe, topology: Topology, config: Any, teacher: Any = None) -> Workload | None:
    """Return what the run does as a workload; None if the formulas do not cover it.

    Args:
        config: the model's config, as transformers opened it.
        teacher: the teacher's, or None.
    """
    workload, unknown = _described(recipe, topology, config, teacher)
    return None if unknown else workload


def _described(recipe: Recipe, topology: Topology, config: Any, teacher: Any) -> tuple[Workload | None, str]:
    """What the run does, as a workload, and what of it the formulas do not cover; None: not this model."""
    found: list[str] = []
    if topology.strategy.name == "fsdp1":
        found.append(topology.strategy.name)
    elif not topology.reshard_after_forward:
        found.append("unsharded weights (fsdp_reshard_after_forward: false)")
    if topology.strategy.shards and recipe.method == "qlora" and not topology.load_on_rank0:
        found.append("a whole model in 4 bits on each GPU while it is loaded")
    shapes: list[Shape | None] = [None, None]
    for i, each in enumerate((config, teacher)):
        try:
            shapes[i] = each and shape_of(each.to_dict(), recipe.model_name_or_path)
        except UserError:
            return None, ", ".join([*found, f"a model of type {each.to_dict().get('model_type')!r}"])
    shape, of_teacher = shapes
    assert shape is not None
    unknown = ", ".join([*found, *(f"--{key}" for key in uncovered(recipe, shape))])
    of = Workload.of(
        recipe,
        shape,
        topology.strategy,
        topology.num_processes,
        num_replicas=topology.num_replicas,
        teacher=of_teacher,
        sequence_parallel_size=topology.sequence_parallel_size,
    )
    file_bytes = config.dtype.itemsize if config.dtype else 4
    of = replace(of, mixed_precision=topology.mixed_precision, device_memory=gpu_memory(topology))
    return replace(of, file_bytes=file_bytes), unknown


def plan_record(workload: Workload | None, topology: Topology) -> dict[str, Any]:
    """Return the entry ``plan`` of ``run.json``, to compare with what is measured.

    It has bytes of one GPU, and operations per token of forward and backward pass without recomputation, with those of
    a step's passes without gradients. It is empty on a CPU, and where the formulas do not describe the run.
    """
    if workload is None or topology.device_type != "cuda":
        return {}
    memory = predict(workload)
    return {
        "tensors": memory.tensors,
        "peak": memory.peak,
        "components": memory.components,
        "operations_per_token": operations_per_token(without_recomputation(workload)),
    }


def memory_problems(workload: Workload | None, topology: Topology) -> list[Problem]:
    """Return a problem if the run cannot fit the GPUs of this machine."""
    total = gpu_memory(topology)
    if total is None or workload is None:
        return []
    memory = predict(workload)
    if memory.tensors * (1 - MARGIN) <= total:
        return []
    largest = sorted(memory.components.items(), key=lambda entry: -entry[1])[:3]
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    found = f"the run needs about {memory.peak / GIB:.1f} GiB per GPU ({shown}), a GPU has {total / GIB:.1f}"
    fix = (
        "--gradient_checkpointing true, then --per_device_train_batch_size 1; `kit plan` with the same flags says what "
        "fits; --skip_memory_check true starts it all the same"
    )
    if workload.teacher:
        fix += f"; {FOR_TEACHER}"
    return [Problem("memory", found, fix=fix)]


def check_disk(recipe: Recipe, topology: Topology, config: Any, total_steps: int | None = None) -> str:
    """Return how much of the disk of ``output_dir`` is free, and how much the run needs, as a line.

    It needs the final model and the checkpoints that are there at once. Those that are there already have their room.

    Args:
        config: the model's config, as transformers opened it.
        total_steps: of the run; None: not known.

    Raises:
        UserError: the disk has less than the run needs, or cannot be written to.
    """
    workload = planned_workload(recipe.model_copy(update=dict.fromkeys(ONLY_ADDED)), topology, config)
    if workload is None:
        return "not checked: the plan does not cover this run"
    workload = replace(workload, num_checkpoints=num_checkpoints(recipe, total_steps))
    folder = Path(os.path.expanduser(recipe.output_dir or ".")).absolute()
    there = sum(file.stat().st_size for file in folder.glob("checkpoints/step-*/*"))
    disk_folder = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(disk_folder, os.W_OK):
        raise UserError("output_dir", f"{disk_folder} cannot be written to", fix="another folder")
    free = shutil.disk_usage(disk_folder).free
    disk = {name: size for name, size in predict(workload).disk.items() if "own files" not in name}
    wanted = max(0, sum(disk.values()) - there)
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in disk.items())
    found = f"{format_bytes(free)} free in {disk_folder}, {format_bytes(wanted)} needed ({shown})"
    if free < wanted:
        fix = (
            "free disk space, choose another --output_dir, or save less: --save_total_limit 1, --save_steps 0, "
            "--save_only_model; --skip_memory_check true starts it all the same"
        )
        raise UserError("output_dir", found, fix=fix)
    return found
