"""Out of memory: in which phase, what fills the memory compared with the plan, and settings that help.

Promises: every weight, gradient and state on the device that ran out counts once, in one component; of a sharded tensor
only this rank's shard counts. Measuring allocates almost nothing, and needs no other rank. The cheapest setting comes
first, and the message says with which the same run can be resumed.
"""

import re
import resource
import sys
from collections.abc import Iterable
from traceback import walk_tb
from typing import TYPE_CHECKING

import psutil
import torch

from kit.config.recipe import IDENTITY
from kit.memory.fit import planned_workload
from kit.memory.formulas import FOUR_BIT, FROZEN, GATHERED, GRADIENTS, OPTIMISER, TRAINABLE, Memory, predict
from kit.memory.sizes import format_bytes
from kit.strategy.gradients import keeps_gradients
from kit.strategy.weights import own_part, own_shards, unsharded_weights
from kit.system.errors import UserError, causes, first_line, out_of_memory
from kit.system.phases import TRAINING, Phase
from kit.system.visible import Layout, joined

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.strategy.topology import Topology

_OF_CPU = re.compile("DefaultCPUAllocator|bad_alloc|annot allocate|PyObject")  # in messages of RuntimeError
COMPONENTS = (FROZEN, TRAINABLE, GRADIENTS, OPTIMISER, GATHERED)
# What may help, the cheapest first: key, value, cost.
_SETTINGS = (
    ("per_device_eval_batch_size", "1", "slower evaluations"),
    ("per_device_train_batch_size", "1", "slower; the same maths"),
    ("async_save", "false", "training waits for each save; frees host memory"),
    ("gradient_checkpointing", "true", "about a third more compute; the same maths"),
    ("activation_offload", "true", "with gradient_checkpointing: host memory, and copies to it"),
    ("config", "fsdp", "several GPUs: shards weights, gradients, optimiser"),
    ("optim", "adamw_8bit", "other rounding; a quarter of the state; not with --config fsdp"),
    ("method", "qlora", "trains adapters only, on a base quantised to 4 bits"),
)
_OF_TEACHER = (
    ("teacher_in_4bit", "true", "a teacher quantised to 4 bits"),
    ("teacher_top_k", "64", "offline distillation: its top-k log-probabilities, cached first"),
)
_OF_SCORING = ("per_device_eval_batch_size", "config", "max_length")
REST = "activations, logits, the rest"


def explain(
    error: BaseException,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    phase: Phase,
    recipe: "Recipe",
    topology: "Topology",
    trains: bool = True,
) -> UserError | None:
    """Return the error to show to the user; None if no cause of ``error`` is about memory.

    Called by the rank that failed, while the traceback of ``error`` exists: it shows what the run was doing.

    Args:
        model: None if it does not exist yet. It may be changed (resharded), and must not be used afterwards.
        optimizer: None if it does not exist yet.
        phase: of the run.
        trains: whether there are steps and checkpoints.
    """
    cause = out_of_memory(error)
    if cause is None:
        return None
    rank = _rank(error)
    on_cpu = not isinstance(cause, RuntimeError) or bool(_OF_CPU.search(str(cause)))
    planned = None
    beside = recipe.teacher and not recipe.teacher_top_k  # whose shape is not known here
    if trains and not on_cpu and not beside and (config := getattr(model, "config", None)) is not None:
        workload = planned_workload(recipe, topology, config)
        planned = predict(workload) if workload else None
    doing = _part_of_step(error) if phase is TRAINING else phase.noun or phase.doing
    lines = [
        f"{f'rank {rank}: ' if rank is not None else ''}in {doing}",
        first_line(cause),
        *_table(components(model, optimizer, on_cpu), peak_bytes(on_cpu), planned),
    ]
    if on_cpu:
        memory = psutil.virtual_memory()
        lines.append(f"of the machine's {format_bytes(memory.total)}, {format_bytes(memory.available)} are free")
    return UserError("out of memory", joined(lines, "\n    "), fix=_advice(recipe, trains))


def _part_of_step(error: BaseException) -> str:
    """The part of a training step, by what is in the traceback."""
    part = TRAINING.noun
    for cause in causes(error):
        for frame, _ in walk_tb(cause.__traceback__):
            module = frame.f_globals.get("__name__")
            if module == "torch.autograd" and frame.f_code.co_name == "backward":
                return "the backward pass"
            if module == "accelerate.optimizer":
                return "the optimiser's step"
            if isinstance(frame.f_locals.get("self"), torch.nn.Module):
                part = "the forward pass"
    return part


def _rank(error: BaseException) -> int | None:
    """The rank that failed: this one, or the rank that the message names; a failed save is raised on all ranks."""
    if not torch.distributed.is_initialized():
        return None
    named = (re.search(r"\brank (\d+): ", str(cause)) for cause in causes(error))
    return next((int(match[1]) for match in named if match), torch.distributed.get_rank())


def peak_bytes(on_cpu: bool) -> int:
    """Return the highest use of memory by this process: resident on a CPU, GPU or not, and allocated on a GPU.

    Of MPS, which counts no peak: what its driver has given, which falls only when the allocator returns its cache.
    """
    if on_cpu:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if torch.backends.mps.is_available():
        return torch.mps.driver_allocated_memory()
    return torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0


def components(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, on_cpu: bool) -> dict[str, int]:
    """Measure what this process holds, by ``COMPONENTS``; of a sharded tensor only its own shard.

    Args:
        on_cpu: measure the CPU's memory; else the GPU's.
    """
    if model is None:
        return dict.fromkeys(COMPONENTS, 0)

    @torch.no_grad()
    def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
        once = {id(tensor): tensor for tensor in tensors}  # states in 8 bits share their tables
        own = [own_part(tensor) for tensor in once.values()]
        here = [tensor for tensor in own if (tensor.device.type == "cpu") == on_cpu and not tensor.is_meta]
        return sum(tensor.numel() * tensor.element_size() for tensor in here)

    gathered = num_bytes(unsharded_weights(model))
    shards = own_shards(model)
    parameters = list(model.parameters()) if shards is None else shards
    trainable = [p for p in parameters if p.requires_grad]
    graded = trainable if keeps_gradients(model) else [p for p in trainable if p.grad is not None]
    states = optimizer.state if optimizer is not None else {}
    return {
        FROZEN: num_bytes(p for p in parameters if not p.requires_grad),
        TRAINABLE: num_bytes(trainable),
        GRADIENTS: num_bytes(p if p.grad is None else p.grad for p in graded),
        OPTIMISER: num_bytes(each for state in states.values() for each in state.values() if torch.is_tensor(each)),
        GATHERED: gathered,
    }


def _table(held: dict[str, int], peak: int, planned: Memory | None) -> list[str]:
    """Lines of measured and, if there is a plan, planned memory. The components add up to the peak."""
    taken = {**held, REST: max(0, peak - sum(held.values()))}
    plan = dict.fromkeys(taken, 0)
    for name, size in planned.components.items() if planned else ():
        plan[FROZEN if name == FOUR_BIT else name if name in held else REST] += size
    rows = [(name, size, plan[name]) for name, size in taken.items() if size or plan[name]]
    rows.append(("peak of this process", peak, sum(plan.values())))
    lines = [f"{'':30}{'taken':>12}{'planned' if planned else '':>12}"]
    lines += [f"{name:30}{format_bytes(a):>12}{format_bytes(b) if planned else '':>12}" for name, a, b in rows]
    return [line.rstrip() for line in lines]


def _advice(recipe: "Recipe", trains: bool) -> str:
    """Settings that may help and are not set already, the cheapest first."""
    lines = ["one of these may help, the cheapest first"]
    if trains:
        lines = [
            "cheapest first; the same command with one of these resumes from the last checkpoint; * starts a new run"
        ]
    settings: tuple[tuple[str, str, str], ...] = _SETTINGS
    if recipe.teacher:
        settings += _OF_TEACHER if not recipe.teacher_top_k and not recipe.on_policy_share else _OF_TEACHER[:1]
    for key, value, cost in (*settings, ("max_length", str(recipe.max_length // 2), "longer samples")):
        if str(getattr(recipe, key, "")).lower() != value and (trains or key in _OF_SCORING):
            mark = "*" if trains and key in IDENTITY else " "
            lines.append(f"  {mark} {f'--{key} {value}':34}  {cost}")
    return Layout(joined(lines, "\n    "))
