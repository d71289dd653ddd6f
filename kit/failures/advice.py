"""Out of memory: the settings to change.

Promises: they come in order of cost, only those that apply to the run and help against what is full; for each it is
told whether the run goes on with it or becomes another.
"""

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.config.recipe import IDENTITY
from kit.errors import Problem, UserError
from kit.failures.memory import Shortage, measure, size
from kit.failures.phases import EVALUATING, GENERATING, LOADING
from kit.strategy.topology import takes_optimizer, ways_to_share

if TYPE_CHECKING:
    import torch

    from kit.config.recipe import Recipe
    from kit.strategy.topology import Topology

_SMALL = 0.05  # what holds less of the peak is not worth changing
_OF_TRAINING = ("gradient_checkpointing", "async_save", "optim")  # settings that help only where a step is taken


class Setting(NamedTuple):
    """What to type, what it costs, and the key where it is a flag."""

    text: str
    cost: str
    key: str = ""


def explain(
    error: BaseException,
    model: "torch.nn.Module | None",
    optimizer: "torch.optim.Optimizer | None",
    recipe: "Recipe",
    topology: "Topology",
    trains: bool = True,
) -> UserError | None:
    """What to tell the user; None if ``error`` is not about memory.

    Args:
        trains: there are steps and checkpoints; the other arguments are as in ``memory.measure``.
    """
    shortage = measure(error, model, optimizer, recipe, topology)
    if shortage is None:
        return None
    ways = settings(shortage, recipe, topology)
    # A model that knows no other attention is left with it.
    if model is not None and any(not getattr(module, "_supports_sdpa", True) for module in model.modules()):
        ways = [way for way in ways if way.key != "attn_implementation"]
    if not trains:
        ways = [way for way in ways if way.key not in _OF_TRAINING and way.text != "--method lora"]
    return UserError(Problem("out of memory", "\n    ".join(shortage.lines()), fix=_listed(ways, trains)))


def settings(shortage: Shortage, recipe: "Recipe", topology: "Topology") -> list[Setting]:
    """What to change, the cheapest first."""
    phase, asked, device, held = shortage.phase, shortage.asked, shortage.device, shortage.held
    loading, evaluating = phase is LOADING, phase in (EVALUATING, GENERATING)
    moments = held.optimizer + held.optimizer_to_come

    def counts(num_bytes: int) -> bool:
        return loading or num_bytes >= _SMALL * max(device.peak, held.total)

    activations = shortage.trains_here and phase.activations and counts(device.peak - held.total)
    ways = []
    if device.limit:
        ways.append(Setting(f"ulimit {device.limit[1]} unlimited", "nothing, where you may lift the limit"))
    if device.others > device.total // 10:
        ways.append(Setting("nvidia-smi", f"nothing; lists who else holds {size(device.others)} of this GPU"))
    allocator = [os.environ.get(f"PYTORCH_{name}ALLOC_CONF", "") for name in ("", "CUDA_")]
    if device.unused > (asked or device.total // 10) and "expandable_segments:True" not in ",".join(allocator):
        ways.append(Setting("PYTORCH_ALLOC_CONF=expandable_segments:True", "nothing"))
    keeps_scores = recipe.attn_implementation == "eager" or (recipe.packing and recipe.attn_implementation == "sdpa")
    if activations and keeps_scores:
        ways.append(_set("attn_implementation", "auto", "nothing: faster, and no T x T matrices"))
    if recipe.async_save and shortage.is_saving and device.is_cpu and counts(held.to_save):
        ways.append(_set("async_save", "false", "training waits for each save, which takes one copy less"))
    if activations and recipe.per_device_train_batch_size > 1:
        batch_size = _smaller_batch(recipe, topology.num_processes)
        ways.append(_set("per_device_train_batch_size", batch_size, "some speed; the same maths"))
    if phase is GENERATING:
        ways.append(_set("max_new_tokens", -(-recipe.max_new_tokens // 2), "answers that are cut earlier"))
        ways.append(_set("predict_with_generate", "false", "the exact match"))
    if activations and not evaluating and not recipe.gradient_checkpointing:
        ways.append(_set("gradient_checkpointing", "true", "about a third more compute; the same maths"))
    if device.is_cpu or counts(held.total):
        ways += [_set(*way) for way in ways_to_share(topology, recipe, device.is_cpu)]
    shrinkable = not loading and counts(moments)
    if shrinkable and "8bit" not in recipe.optim and takes_optimizer(topology.strategy, "adamw_8bit"):
        ways.append(_set("optim", "adamw_8bit", "other rounding; a quarter of the state"))
    if shrinkable and recipe.optim == "adamw_8bit" and not device.is_cpu:
        ways.append(_set("optim", "paged_adamw_8bit", "speed: CPU memory takes what is too much"))
    if counts(held.trainable + held.gradients + held.gradients_to_come + moments) and recipe.method == "full":
        ways.append(_set("method", "lora", "training of adapters only: no gradients and state of the rest"))
    if counts(held.frozen) and recipe.method == "lora" and not recipe.use_dora:
        ways.append(_set("method", "qlora", "rounding of frozen weights to 4 bits, and speed"))
    if activations and recipe.max_length > 8:
        what = {"truncate": "are cut", "drop": "are left out", "error": "stop the run", "split": "come in pieces"}
        cost = f"longer samples, which {what[recipe.excess_length_strategy]}"
        ways.append(_set("max_length", max(8, recipe.max_length // 2), cost))
    return ways


def _set(key: str, value: Any, cost: str) -> Setting:
    return Setting(f"--{key} {value}", cost, key)


def _smaller_batch(recipe: "Recipe", num_processes: int) -> int:
    """At most half, and still a divisor of what each process reads of the global batch."""
    share = recipe.global_batch_size // num_processes
    return next(n for n in range(recipe.per_device_train_batch_size // 2, 0, -1) if share % n == 0)


def _listed(ways: list[Setting], trains: bool) -> str:
    """The settings with what they cost, those that keep the run apart from those that make it another."""
    if not ways:
        return "a smaller model, or a device with more memory"
    width = max(len(way.text) for way in ways)
    order = "cheapest first, at the cost of"
    groups = [(f"the same command with one of these; {order}", ways)]
    if trains:
        same = [way for way in ways if way.key not in IDENTITY]
        other = [way for way in ways if way.key in IDENTITY]
        groups = [
            (f"the same command with one of these goes on from the last checkpoint; {order}", same),
            (f"these make it another run, with an --output_dir of its own; {order}", other),
        ]
    lines = []
    for title, group in groups:
        lines += [f"-> {title}", *(f"   {way.text:{width}}  {way.cost}" for way in group)] if group else []
    return "\n    ".join(lines).removeprefix("-> ")
