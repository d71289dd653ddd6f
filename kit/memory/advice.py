"""Out of memory: the settings that the user can change, with the cost of each.

Promises: the cheapest comes first; only settings are listed that apply to this run and reduce what fills the memory;
the message says for each whether the same run can continue with it or a new run is needed.
"""

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.config.recipe import IDENTITY
from kit.errors import Problem, UserError
from kit.memory.fit import fits, planned_workload
from kit.memory.shortage import Shortage, find_shortage
from kit.memory.sizes import format_bytes
from kit.phases import COMPARING, EVALUATING, GENERATING, LOADING, REFERENCE
from kit.strategy.topology import gpu_memory, takes_optimizer, ways_to_share
from kit.visible import Layout, joined

if TYPE_CHECKING:
    import torch

    from kit.config.recipe import Recipe
    from kit.config.settings.optimisation import OptimSettings
    from kit.strategy.topology import Topology

_SMALL = 0.05  # share of the peak; a component below it is not worth reducing
_OF_TRAINING = (
    "gradient_checkpointing",
    "activation_offload",
    "async_save",
    "optim",
)  # settings that help only where a step is taken
# The same AdamW whose state CUDA moves to host memory, and the same optimiser with its state in 8 bits.
_PAGED = {
    "adamw_torch": "paged_adamw_32bit",
    "adamw_torch_fused": "paged_adamw_32bit",
    "adamw_8bit": "paged_adamw_8bit",
}
_IN_8_BITS = {
    "adamw_torch": "adamw_8bit",
    "adamw_torch_fused": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw_8bit",
    "lion_32bit": "lion_8bit",
}
# What happens to samples longer than ``max_length``, by ``excess_length_strategy``.
_LONGER_SAMPLES = {
    "truncate": "are cut",
    "keep_end": "are cut at the start",
    "drop": "are left out",
    "error": "stop the run",
    "split": "come in pieces",
}


class SettingChange(NamedTuple):
    """A change of a setting of the recipe, or of the process, that frees memory."""

    text: str  # what to type
    cost: str  # what gets slower, worse or different
    key: str = ""  # the key of the recipe; empty if it is not a setting of the recipe


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
    shortage = find_shortage(error, model, optimizer, recipe, topology)
    if shortage is None:
        return None
    changes = setting_changes(shortage, recipe, topology, _selective_fits(model, recipe, topology))
    # Some models have no attention other than eager.
    if model is not None and any(not getattr(module, "_supports_sdpa", True) for module in model.modules()):
        changes = [change for change in changes if change.key != "attn_implementation"]
    if not trains:
        changes = [change for change in changes if change.key not in _OF_TRAINING and change.text != "--method lora"]
    return UserError(Problem("out of memory", joined(shortage.lines(), "\n    "), fix=_fix_with(changes, trains)))


def setting_changes(
    shortage: Shortage, recipe: "Recipe", topology: "Topology", selective_fits: bool = False
) -> list[SettingChange]:
    """Return the changes that reduce the memory in use, the cheapest first.

    Args:
        selective_fits: whether selective gradient checkpointing is enough by the plan.
    """
    phase, device, held = shortage.phase, shortage.device, shortage.held
    loading = phase is LOADING
    evaluating = phase in (EVALUATING, GENERATING, REFERENCE)  # with batches of an evaluation
    moments = held.optimizer + held.optimizer_to_come

    def counts(num_bytes: int) -> bool:
        return loading or num_bytes >= _SMALL * max(device.peak, held.total)

    activations = shortage.trains_here and phase.activations and counts(device.peak - held.total)
    changes = []
    if device.limit:
        changes.append(SettingChange(f"ulimit {device.limit[1]} unlimited", "nothing, where you may lift the limit"))
    if device.others > device.total // 10:
        cost = f"nothing; lists who else holds {format_bytes(device.others)} of this GPU"
        changes.append(SettingChange("nvidia-smi", cost))
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    # Where as much as was requested is free, in pieces that are too small.
    if device.unused > (shortage.asked or device.total // 10) and "expandable_segments:True" not in allocator:
        changes.append(SettingChange("PYTORCH_ALLOC_CONF=expandable_segments:True", "nothing"))
    keeps_scores = recipe.attn_implementation == "eager" or (recipe.packing and recipe.attn_implementation == "sdpa")
    if activations and keeps_scores:
        changes.append(_set("attn_implementation", "auto", "nothing: faster, and no T x T matrices"))
    if recipe.async_save and shortage.is_saving and device.is_cpu and counts(held.to_save):
        changes.append(_set("async_save", "false", "training waits for each save, which takes one copy less"))
    if recipe.sync_each_batch is False and held.sharded and counts(held.gradients):
        changes.append(_set("sync_each_batch", "true", "communication after each micro-batch"))
    if activations and evaluating and recipe.eval_batch_size > 1:
        cost = "some speed before the first step" if phase is REFERENCE else "some speed of evaluations"
        changes.append(_set("per_device_eval_batch_size", recipe.eval_batch_size // 2, cost))
    if activations and not evaluating and recipe.micro_batch_size > 1:
        batch_size = _smaller_batch(recipe, topology.num_processes)
        changes.append(_set("per_device_train_batch_size", batch_size, "some speed; the same maths"))
    if phase is GENERATING:
        changes.append(_set("max_new_tokens", -(-recipe.max_new_tokens // 2), "answers that are cut earlier"))
        changes.append(_set("predict_with_generate", "false", "the exact match"))
    if activations and not (evaluating or phase is COMPARING) and recipe.gradient_checkpointing is not True:
        if selective_fits and not recipe.gradient_checkpointing:
            cost = "a little more compute; the same maths"
            changes.append(_set("gradient_checkpointing", "selective", cost))
        changes.append(_set("gradient_checkpointing", "true", "about a third more compute; the same maths"))
    offloads = recipe.activation_offload or not recipe.gradient_checkpointing or topology.device_type != "cuda"
    if activations and not (evaluating or phase is COMPARING) and not offloads:
        changes.append(_set("activation_offload", "true", "host memory, and copies to it; the same maths"))
    if device.is_cpu or counts(held.total):
        changes += [_set(*flag) for flag in ways_to_share(topology, recipe, device.is_cpu)]
    shrinkable = not loading and phase is not REFERENCE and counts(moments)  # which has no state yet
    paged, smaller = _PAGED.get(recipe.optim), _IN_8_BITS.get(recipe.optim)
    if shrinkable and paged and topology.device_type == "cuda" and takes_optimizer(topology.strategy, paged):
        changes.append(_set("optim", paged, "speed: CPU memory takes what is too much"))
    if shrinkable and smaller and takes_optimizer(topology.strategy, smaller):
        changes.append(_set("optim", smaller, "other rounding; a quarter of the state"))
    trained = held.trainable + held.gradients + held.gradients_to_come + moments
    can_be_bf16 = topology.mixed_precision == "bf16" and takes_optimizer(topology.strategy, "adamw_bf16")
    in_float32 = recipe.method == "full" and recipe.optim in _IN_8_BITS and recipe.optim != "lion_32bit"
    if counts(trained) and in_float32 and can_be_bf16 and not loading:
        changes.append(_set("optim", "adamw_bf16", "rounding of weights and moments to bf16, at random; half of each"))
    if counts(trained) and recipe.method == "full":
        changes.append(_set("method", "lora", "training of adapters only: no gradients and state of the rest"))
    if counts(held.frozen) and recipe.method == "lora" and not recipe.use_dora:
        changes.append(_set("method", "qlora", "rounding of frozen weights to 4 bits, and speed"))
    if activations and recipe.max_length > 8:
        changes.append(_set("max_length", max(8, recipe.max_length // 2), _cost_of_shorter(recipe)))
    return changes


def _selective_fits(model: "torch.nn.Module | None", recipe: "Recipe", topology: "Topology") -> bool:
    """Whether the run fits its GPUs with selective gradient checkpointing; false where there is no plan."""
    config: Any = getattr(model, "config", None)
    total = gpu_memory(topology)
    if config is None or total is None:
        return False
    selective = recipe.model_copy(update={"gradient_checkpointing": "selective"})
    workload = planned_workload(selective, topology, config)
    return workload is not None and fits(workload, total)


def _cost_of_shorter(recipe: "Recipe") -> str:
    """What a shorter ``max_length`` costs. Of samples that are compared, the start of the prompt is cut."""
    strategy = recipe.excess_length_strategy
    kept_answers = recipe.declared.rows != "answers" and strategy in ("truncate", "keep_end")
    cost = f"longer samples, {'whose prompts are cut' if kept_answers else f'which {_LONGER_SAMPLES[strategy]}'}"
    if recipe.declared.rows == "pairs":
        cost += "; a pair takes two sequences of this length, in any micro-batch"
    return cost


def _set(key: str, value: Any, cost: str) -> SettingChange:
    return SettingChange(f"--{key} {value}", cost, key)


def _smaller_batch(settings: "OptimSettings", num_processes: int) -> int:
    """The largest micro-batch size of at most half the current one that divides each process's share of the batch."""
    share = settings.global_batch_size // num_processes
    return next(n for n in range(settings.micro_batch_size // 2, 0, -1) if share % n == 0)


def _fix_with(changes: list[SettingChange], trains: bool) -> str:
    """The changes as lines; of training in two groups: a run can continue with the first, the others make a new run."""
    if not changes:
        return "a smaller model, or a device with more memory"
    width = max(len(change.text) for change in changes)
    order = "cheapest first, at the cost of"
    groups = [(f"the same command with one of these; {order}", changes)]
    if trains:
        same = [change for change in changes if change.key not in IDENTITY]
        other = [change for change in changes if change.key in IDENTITY]
        groups = [
            (f"the same command with one of these goes on from the last checkpoint; {order}", same),
            (f"these make it another run, with an --output_dir of its own; {order}", other),
        ]
    lines = []
    for title, group in groups:
        if group:
            lines.append(f"-> {title}")
            lines += [f"   {change.text:{width}}  {change.cost}" for change in group]
    return Layout(joined(lines, "\n    ").removeprefix("-> "))
