"""Out of memory: what filled it, and the settings that would help, each with its cost.

Promises: the cheapest comes first; the message says for each whether the same run can continue with it or a new run is
needed.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from kit.config.recipe import IDENTITY
from kit.errors import Problem, UserError
from kit.memory.fit import planned_workload
from kit.memory.formulas import predict
from kit.memory.shortage import Shortage, find_shortage
from kit.phases import EVALUATING, GENERATING, LOADING, REFERENCE
from kit.strategy.strategies import FSDP2
from kit.strategy.topology import takes_optimizer
from kit.visible import Layout, joined

if TYPE_CHECKING:
    import torch

    from kit.config.recipe import Recipe
    from kit.config.settings.optimisation import OptimSettings
    from kit.strategy.topology import Topology


class Change(NamedTuple):
    """A change that frees memory."""

    key: str  # a key of the recipe, or a flag of the launch
    value: str | int
    cost: str  # what gets slower, worse or different


def explain(
    error: BaseException,
    model: "torch.nn.Module | None",
    optimizer: "torch.optim.Optimizer | None",
    recipe: "Recipe",
    topology: "Topology",
    trains: bool = True,
) -> UserError | None:
    """Return the error to show to the user; None if ``error`` is not about memory.

    Args:
        trains: whether there are steps and checkpoints; the other arguments are those of ``find_shortage``.
    """
    shortage = find_shortage(error, model, optimizer)
    if shortage is None:
        return None
    config: Any = getattr(model, "config", None)
    planned = None
    if trains and config is not None and not shortage.device.is_cpu:
        workload = planned_workload(recipe, topology, config)
        planned = predict(workload) if workload else None
    fix = _fix_with(changes(shortage, recipe, topology, trains), trains)
    return UserError(Problem("out of memory", joined(shortage.lines(planned), "\n    "), fix=fix))


def changes(shortage: Shortage, recipe: "Recipe", topology: "Topology", trains: bool = True) -> list[Change]:
    """Return the changes that apply to the run, the cheapest first."""
    on_cpu, on_gpus = shortage.device.is_cpu, topology.device_type != "cpu"
    if on_cpu and on_gpus:  # what is computed is on the GPUs
        copies = trains and recipe.async_save
        return [Change("async_save", "false", "training waits for each save")] if copies else []
    evaluates = not trains or shortage.phase in (EVALUATING, GENERATING, REFERENCE)  # with batches of an evaluation
    computes = shortage.phase is not LOADING
    steps = computes and not evaluates
    recomputes = bool(recipe.gradient_checkpointing)
    shares = on_gpus and takes_optimizer(FSDP2, recipe.optim)
    in_8_bits = recipe.optim.startswith("adamw_torch") and not topology.strategy.shards
    smaller = _smaller_batch(recipe, topology.num_processes)
    table = [
        (computes and evaluates and recipe.eval_batch_size > 1, Change("per_device_eval_batch_size", 1, "some speed")),
        (steps and smaller > 0, Change("per_device_train_batch_size", smaller, "some speed; the same maths")),
        (steps and on_cpu and recipe.async_save, Change("async_save", "false", "training waits for each save")),
        (
            steps and recipe.gradient_checkpointing is not True,
            Change("gradient_checkpointing", "true", "about a third more compute; the same maths"),
        ),
        (
            steps and recomputes and on_gpus and not recipe.activation_offload,
            Change("activation_offload", "true", "host memory, and copies to it; the same maths"),
        ),
        (
            shares and not topology.strategy.shards,
            Change("config", "fsdp", "several GPUs, to share weights and optimiser"),
        ),
        (
            shares and topology.strategy.shards and not topology.strategy.offloads and recipe.method != "qlora",
            Change("config", "fsdp_offload", "much speed: CPU memory takes weights and optimiser"),
        ),
        (steps and in_8_bits, Change("optim", "adamw_8bit", "other rounding; a quarter of the state")),
        (
            trains and recipe.method == "full",
            Change("method", "lora", "training of adapters only: no gradients and state of the rest"),
        ),
        (
            recipe.method == "lora" and not recipe.use_dora,
            Change("method", "qlora", "rounding of frozen weights to 4 bits, and speed"),
        ),
        (
            computes and recipe.max_length > 8,
            Change("max_length", max(8, recipe.max_length // 2), f"longer samples ({recipe.excess_length_strategy})"),
        ),
    ]
    return [change for applies, change in table if applies]


def _smaller_batch(settings: "OptimSettings", num_processes: int) -> int:
    """The largest micro-batch of at most half the current one that divides a process's share of the batch; 0: none."""
    share = settings.global_batch_size // num_processes
    return next((n for n in range(settings.micro_batch_size // 2, 0, -1) if share % n == 0), 0)


def _fix_with(found: list[Change], trains: bool) -> str:
    """The changes as lines; of training in two groups: a run can continue with the first, the others make a new run."""
    if not found:
        return "a smaller model, or a device with more memory"
    order = "cheapest first, at the cost of"
    groups = [(f"the same command with one of these; {order}", found)]
    if trains:
        same = [change for change in found if change.key not in IDENTITY]
        other = [change for change in found if change.key in IDENTITY]
        groups = [
            (f"the same command with one of these goes on from the last checkpoint; {order}", same),
            (f"these make it another run, with an --output_dir of its own; {order}", other),
        ]
    lines = []
    for title, group in groups:
        if group:
            lines.append(f"-> {title}")
            lines += [f"   {f'--{change.key} {change.value}':34}  {change.cost}" for change in group]
    return Layout(joined(lines, "\n    ").removeprefix("-> "))
