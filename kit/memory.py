"""Out of memory: what was asked for and where, what the memory is full of, and the settings to change.

Promises: settings come in order of cost, only those that apply to the recipe and help against what is full; for each it
is told whether the run goes on with it or becomes another. Asks next to nothing of a memory that is full, and nothing
of other ranks.
"""

import os
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from kit.errors import Problem, UserError, causes, out_of_memory
from kit.run import IDENTITY
from kit.strategy import own_shards

if TYPE_CHECKING:
    from kit.config import Recipe

# What a run is doing inside which function, by module and name; the innermost one counts.
PHASES = {
    "kit.model.build_model": "loading",
    "kit.strategy.prepare": "loading",
    "kit.checkpoint.load_checkpoint": "loading",
    "torch.autograd.backward": "the backward pass",
    "accelerate.optimizer.step": "the optimiser's step",
    "kit.evaluate.evaluate": "evaluation",
    "transformers.generation.utils.generate": "generation",
    "kit.saver.save": "saving",
    "kit.export.save_final": "saving",
}
_WITHOUT_ACTIVATIONS = ("loading", "the optimiser's step", "saving")
_SMALL = 0.05  # what holds less of the peak is not worth changing

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
_SIZE = rf"([\d.]+) ({'|'.join(_UNITS)})"


@dataclass(frozen=True)
class Held:
    """Bytes that this process holds on one device, by component."""

    frozen: int = 0  # weights, with the quantisation state of 4-bit ones
    trainable: int = 0
    gradients: int = 0
    optimizer: int = 0
    gradients_to_come: int = 0  # of the step that failed
    optimizer_to_come: int = 0
    sharded: bool = False  # a part of each component; other ranks hold the others

    @property
    def total(self) -> int:
        return self.frozen + self.trainable + self.gradients + self.optimizer


@dataclass(frozen=True)
class Device:
    """Bytes on the device that ran out of memory."""

    name: str
    total: int
    free: int
    peak: int  # of this process: allocated on a GPU, resident on a CPU
    unused: int = 0  # reserved by torch's allocator of a GPU, in pieces too small for what was asked for
    others: int = 0  # in use on a GPU by other processes
    limit: tuple[int, str] | None = None  # of this process on a CPU, and the option of ulimit that sets it

    @property
    def is_cpu(self) -> bool:
        return self.name == "CPU"


class Setting(NamedTuple):
    """What to type, what it costs, and the key where it is a flag."""

    text: str
    cost: str
    key: str = ""


def explain(
    error: BaseException,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    recipe: "Recipe",
    num_processes: int,
) -> UserError | None:
    """What to tell the user; None if ``error``, and all it was raised from, has nothing to do with memory.

    Called by the rank that failed, before the traceback is dropped: it says what the run was doing. ``model`` and
    ``optimizer`` as far as they exist, and not to be used afterwards.
    """
    cause = out_of_memory(error)
    if cause is None:
        return None
    phase, module = _place(error)
    asked = _said(cause, rf"(?:allocate|mmap) {_SIZE}")
    device = _device(cause)
    held = components(model, optimizer, device.is_cpu, "8bit" in recipe.optim)
    # A model that knows no other attention is left with it.
    only_eager = model is not None and any(not getattr(m, "_supports_sdpa", True) for m in model.modules())
    ways = settings(recipe, phase, asked, held, device, num_processes)
    ways = [way for way in ways if not (only_eager and way.key == "attn_implementation")]
    rank = f"rank {torch.distributed.get_rank()}: " if torch.distributed.is_initialized() else ""
    what = f"{rank}{_size(asked)} asked for in {phase}" if asked else f"{rank}in {phase}"
    found = "\n    ".join([f"{what}{module}", *_table(held, device, phase)])
    return UserError(Problem("out of memory", found, fix=_listed(ways)))


def settings(
    recipe: "Recipe",
    phase: str,
    asked: int,
    held: Held,
    device: Device,
    num_processes: int,
) -> list[Setting]:
    """What to change, the cheapest first.

    Args:
        phase: one of ``PHASES``, or anything else for the forward pass.
        asked: bytes; 0 where unknown.
    """
    loading, evaluating = phase == "loading", phase in ("evaluation", "generation")
    moments = held.optimizer + held.optimizer_to_come
    on_gpu = not device.is_cpu

    def counts(num_bytes: int) -> bool:
        return loading or num_bytes >= _SMALL * max(device.peak, held.total)

    activations = phase not in _WITHOUT_ACTIVATIONS and counts(device.peak - held.total)
    ways = []
    if device.limit:
        ways.append(Setting(f"ulimit {device.limit[1]} unlimited", "nothing, where you may lift the limit"))
    if device.others > device.total // 10:
        ways.append(Setting("nvidia-smi", f"nothing; lists who else holds {_size(device.others)} of this GPU"))
    allocator = [os.environ.get(f"PYTORCH_{name}ALLOC_CONF", "") for name in ("", "CUDA_")]
    if device.unused > (asked or device.total // 10) and "expandable_segments:True" not in ",".join(allocator):
        ways.append(Setting("PYTORCH_ALLOC_CONF=expandable_segments:True", "nothing"))
    keeps_scores = recipe.attn_implementation == "eager" or (recipe.packing and recipe.attn_implementation == "sdpa")
    if activations and keeps_scores:
        ways.append(_set("attn_implementation", "auto", "nothing: faster, and no T x T matrices"))
    if activations and recipe.per_device_train_batch_size > 1:
        size = _smaller_batch(recipe, num_processes)
        ways.append(_set("per_device_train_batch_size", size, "some speed; the same maths"))
    if phase == "generation":
        ways.append(_set("max_new_tokens", -(-recipe.max_new_tokens // 2), "answers that are cut earlier"))
        ways.append(_set("predict_with_generate", "false", "the exact match"))
    if activations and not evaluating and not recipe.gradient_checkpointing:
        ways.append(_set("gradient_checkpointing", "true", "about a third more compute; the same maths"))
    if device.is_cpu and num_processes > 1:
        ways.append(_set("num_processes", 1, "some speed; the processes of a machine share its memory"))
    if on_gpu and counts(held.total) and not held.sharded:
        cost = "more GPUs, to share weights and optimiser (or speed: fsdp_offload)"
        ways.append(_set("config", "fsdp", cost))
    if on_gpu and counts(held.total) and held.sharded:
        ways.append(_set("num_processes", 2 * num_processes, "more GPUs, to share weights and optimiser"))
        ways.append(_set("config", "fsdp_offload", "much speed: CPU memory takes weights and optimiser"))
    shrinkable = not loading and counts(moments) and not held.sharded  # bitsandbytes takes no shards
    if shrinkable and "8bit" not in recipe.optim:
        ways.append(_set("optim", "adamw_8bit", "other rounding; a quarter of the state (not under FSDP)"))
    if shrinkable and on_gpu and recipe.optim == "adamw_8bit":
        ways.append(_set("optim", "paged_adamw_8bit", "speed: CPU memory takes what is too much (not under FSDP)"))
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


def _listed(ways: list[Setting]) -> str:
    """The settings with what they cost, those that keep the run apart from those that make it another."""
    if not ways:
        return "a smaller model, or a device with more memory"
    width = max(len(way.text) for way in ways)
    same = [way for way in ways if way.key not in IDENTITY]
    other = [way for way in ways if way.key in IDENTITY]
    lines = []
    for title, group in (
        ("the same command with one of these goes on from the last checkpoint; cheapest first, at the cost of", same),
        ("these make it another run, with an --output_dir of its own; cheapest first, at the cost of", other),
    ):
        lines += [f"-> {title}", *(f"   {way.text:{width}}  {way.cost}" for way in group)] if group else []
    return "\n    ".join(lines).removeprefix("-> ")


def _table(held: Held, device: Device, phase: str) -> list[str]:
    still = phase not in ("loading", "saving", "evaluation", "generation")
    rest = "activations, logits, buffers" + (", gathered layers" if held.sharded else "")
    limit = f"; this process may reserve {_size(device.limit[0])} (ulimit {device.limit[1]})" if device.limit else ""
    lost = f", and {_size(device.unused)} lost between tensors" if device.unused else ""
    rows = [
        (device.name, device.total, f"{_size(device.free)} free{limit}"),
        ("peak of this process", device.peak, "resident" if device.is_cpu else f"allocated{lost}"),
        ("  frozen weights", held.frozen, ""),
        ("  trainable weights", held.trainable, ""),
        ("  gradients", held.gradients, _more(held.gradients_to_come) if still else ""),
        ("  optimiser state", held.optimizer, _more(held.optimizer_to_come) if still else ""),
        ("  the rest", max(0, device.peak - held.total), rest + (", Python, libraries" if device.is_cpu else "")),
    ]
    rows = [row for row in rows if row[1] or "to come" in row[2]]
    return [f"{name:20}  {_size(num_bytes):>10}  {note}".rstrip() for name, num_bytes, note in rows]


def _more(num_bytes: int) -> str:
    return f"{_size(num_bytes)} still to come in this step" if num_bytes else ""


def _size(num_bytes: int) -> str:
    unit = next(name for name in reversed(_UNITS) if num_bytes >= _UNITS[name] or name == "bytes")
    digits = {"bytes": 0, "KiB": 1, "MiB": 1}.get(unit, 2)
    return f"{num_bytes / _UNITS[unit]:.{digits}f} {unit}"


def _said(error: BaseException, pattern: str) -> int:
    """Bytes in a message of torch's or numpy's allocators; 0 if it does not say."""
    match = re.search(pattern, str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0


def _place(error: BaseException) -> tuple[str, str]:
    """What the run was doing, and in the class of which module: ``("the backward pass", " (LlamaMLP)")``."""
    phase, module = "", ""
    for each in causes(error):
        traceback = each.__traceback__
        while traceback is not None:
            frame, traceback = traceback.tb_frame, traceback.tb_next
            name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
            if name in PHASES:
                phase, module = PHASES[name], ""
            owner = frame.f_locals.get("self")
            if name == "kit.loss.chunk_loss":
                module = " (logits)"
            elif frame.f_code.co_name == "forward" and isinstance(owner, torch.nn.Module):
                module = f" ({type(owner).__name__.removeprefix('FSDP')})"
    return phase or ("the forward pass" if module else "training"), module


def _device(error: BaseException) -> Device:
    on_cpu = not isinstance(error, RuntimeError) or re.search(
        "DefaultCPUAllocator|bad_alloc|annot allocate", str(error)
    )
    if on_cpu:
        memory = psutil.virtual_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        options = {"-d": resource.RLIMIT_DATA, "-v": resource.RLIMIT_AS}
        limits = [(resource.getrlimit(which)[0], option) for option, which in options.items()]
        limit = min((each for each in limits if 0 < each[0] < memory.total), default=None)
        return Device("CPU", memory.total, memory.available, peak, limit=limit)
    free = total = peak = unused = in_use = index = 0
    if torch.accelerator.is_available():
        index = torch.accelerator.current_device_index()
        peak, in_use = torch.accelerator.max_memory_allocated(), torch.accelerator.memory_reserved()
        unused = in_use - torch.accelerator.memory_allocated()
        free, total = torch.accelerator.get_memory_info()
    # What the message says was so when it failed; since then, tensors were let go.
    total = _said(error, f"total capacity of {_SIZE}") or total
    free = _said(error, f"of which {_SIZE} is free") or free
    in_use = _said(error, f"this process has {_SIZE}") or in_use
    peak = max(peak, _said(error, f"{_SIZE} is allocated by PyTorch"))
    unused = _said(error, f"{_SIZE} is reserved by PyTorch but unallocated") or unused
    return Device(f"GPU {index}", total, free, peak, unused, max(0, total - free - in_use))


def components(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, on_cpu: bool, in_8_bits: bool
) -> Held:
    """What this process holds in CPU memory (``on_cpu``) or on its GPU; of sharded tensors its own part.

    Args:
        in_8_bits: what the optimiser will hold of large tensors after its first step.
    """
    if model is None:
        return Held()

    def is_here(tensor: torch.Tensor) -> bool:
        return (tensor.device.type == "cpu") == on_cpu and not tensor.is_meta

    def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
        once = {id(tensor): tensor for tensor in tensors}  # tables may be shared
        own = [_own(tensor) for tensor in once.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in own if is_here(tensor))

    shards = own_shards(model)
    parameters = list(model.parameters()) if shards is None else shards
    trainable = [p for p in parameters if p.requires_grad]
    states = optimizer.state if optimizer is not None else {}
    groups = optimizer.param_groups if optimizer is not None else []
    stateless = [_own(p) for group in groups for p in group["params"] if not states.get(p)]
    return Held(
        frozen=num_bytes([*(p for p in parameters if not p.requires_grad), *_quantisation(model)]),
        trainable=num_bytes(trainable),
        gradients=num_bytes([p.grad for p in trainable if p.grad is not None]),
        optimizer=num_bytes([t for state in states.values() for t in state.values() if torch.is_tensor(t)]),
        gradients_to_come=num_bytes([p for p in trainable if p.grad is None]),
        optimizer_to_come=sum(_moments(p, in_8_bits) for p in stateless if is_here(p)),
        sharded=shards is not None,
    )


@torch.no_grad()
def _own(tensor: Any) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _moments(parameter: torch.Tensor, in_8_bits: bool) -> int:
    """Bytes of both moments of AdamW; bitsandbytes keeps small tensors as they are."""
    return 2 * parameter.numel() * (1 if in_8_bits and parameter.numel() >= 4096 else parameter.element_size())


def _quantisation(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Scales and tables of 4-bit weights; the scales may be quantised in turn."""
    states = [state for m in model.modules() if (state := getattr(m, "quant_state", None)) is not None]
    for state in states:
        for value in vars(state).values():
            if torch.is_tensor(value):
                yield value
            elif hasattr(value, "absmax"):
                states.append(value)
