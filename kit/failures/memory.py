"""Out of memory: what was asked for and where, and what the memory is full of.

Promises: every tensor counts once, in the component it belongs to, on the device that ran out; of sharded ones the part
that this rank holds. Asks next to nothing of a memory that is full, and nothing of other ranks.
"""

import re
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import torch

from kit.errors import causes, out_of_memory
from kit.failures.phases import BY_FUNCTION, FORWARD, LOADING, SAVING, TRAINING, Phase
from kit.strategy.weights import keeps_gradients, own_shards

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.strategy.topology import Topology

_IN_BACKGROUND = "kit.checkpoint.save._complete"
_ANONYMOUS = ("torch.nn.", "peft.", "bitsandbytes.")  # a model has hundreds of `Linear`; what holds it says which it is

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
    to_save: int = 0  # one copy of what a checkpoint holds, on whatever device the original is
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


@dataclass(frozen=True)
class Shortage:
    """A failure for want of memory."""

    phase: Phase
    module: str  # class of the model's innermost part at work, if any
    asked: int  # bytes; 0 where unknown
    device: Device
    held: Held
    rank: int | None  # that failed; None where there is one process
    trains_here: bool  # not on a GPU while it was the CPU's memory that ran out
    is_saving: bool  # a checkpoint is being written, in the background or not

    def lines(self) -> list[str]:
        """What was asked for, and a table of what the memory is full of."""
        held, device = self.held, self.device
        what = f"in {self.phase.noun}" + (f" ({self.module})" if self.module else "")
        what = f"{size(self.asked)} asked for {what}" if self.asked else what
        who = f"rank {self.rank}: " if self.rank is not None else ""
        limit = f"; this process may reserve {size(device.limit[0])} (ulimit {device.limit[1]})" if device.limit else ""
        lost = f", and {size(device.unused)} lost between tensors" if device.unused else ""
        rest = ["what is being loaded"] if self.phase is LOADING else []
        if self.trains_here and self.phase is not LOADING:
            rest += ["activations, logits, buffers"] + (["gathered layers"] if held.sharded else [])
        rest += ["Python, libraries"] if device.is_cpu else []
        rest += ["a save in progress"] if device.is_cpu and self.is_saving else []
        to_come = (held.gradients_to_come, held.optimizer_to_come) if self.phase.mid_step else (0, 0)
        gradients, optimizer = (f"{size(n)} still to come in this step" if n else "" for n in to_come)
        rows = [
            (device.name, device.total, f"{size(device.free)} free{limit}"),
            ("peak of this process", device.peak, "resident" if device.is_cpu else f"allocated{lost}"),
            ("  frozen weights", held.frozen, ""),
            ("  trainable weights", held.trainable, ""),
            ("  gradients", held.gradients, gradients),
            ("  optimiser state", held.optimizer, optimizer),
            ("  the rest", max(0, device.peak - held.total), ", ".join(rest)),
        ]
        rows = [row for row in rows if row[1] or "to come" in row[2]]
        return [who + what, *(f"{name:20}  {size(number):>10}  {note}".rstrip() for name, number, note in rows)]


def measure(
    error: BaseException,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    recipe: "Recipe",
    topology: "Topology",
) -> Shortage | None:
    """What ``error`` tells, and the memory now; None if it, and all it was raised from, is not about memory.

    Called by the rank that failed, before the traceback is dropped: it says what the run was doing. ``model`` and
    ``optimizer`` as far as they exist, and not to be used afterwards.
    """
    cause = out_of_memory(error)
    if cause is None:
        return None
    phase, module = _phase_and_module(error)
    device = _device(cause)
    return Shortage(
        phase,
        module,
        asked=_said(cause, rf"(?:allocate|mmap) {_SIZE}"),
        device=device,
        held=components(model, optimizer, device.is_cpu, "8bit" in recipe.optim),
        rank=_rank(error),
        trains_here=device.is_cpu == (topology.device_type == "cpu"),
        is_saving=phase is SAVING or any(_IN_BACKGROUND in _calls(each) for each in sys._current_frames().values()),
    )


def size(num_bytes: int) -> str:
    """Bytes as people read them: ``1.50 GiB``."""
    unit = next(name for name in reversed(_UNITS) if num_bytes >= _UNITS[name] or name == "bytes")
    digits = {"bytes": 0, "KiB": 1, "MiB": 1}.get(unit, 2)
    return f"{num_bytes / _UNITS[unit]:.{digits}f} {unit}"


def _said(error: BaseException, pattern: str) -> int:
    """Bytes in a message of torch's or numpy's allocators; 0 if it does not say."""
    match = re.search(pattern, str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0


def _phase_and_module(error: BaseException) -> tuple[Phase, str]:
    """What the run was doing, and in which class of the model's modules: ``(BACKWARD, "LlamaMLP")``."""
    phase: Phase | None = None
    module = ""
    for each in causes(error):
        traceback = each.__traceback__
        while traceback is not None:
            frame, traceback = traceback.tb_frame, traceback.tb_next
            name, owner = _name(frame), frame.f_locals.get("self")
            if name in BY_FUNCTION:  # the innermost one counts
                phase, module = BY_FUNCTION[name], ""
            if name == "kit.model.loss_head.chunk_loss":
                module = "logits"
            elif frame.f_code.co_name == "forward" and isinstance(owner, torch.nn.Module):
                is_named = not type(owner).__module__.startswith(_ANONYMOUS)
                module = type(owner).__name__.removeprefix("FSDP") if is_named else module
    return phase or (FORWARD if module else TRAINING), module


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"


def _calls(frame: FrameType | None) -> Iterator[str]:
    """The function a thread is in, and those it was called by."""
    while frame is not None:
        yield _name(frame)
        frame = frame.f_back


def _rank(error: BaseException) -> int | None:
    """Who failed: a failed save is raised on all ranks, and says on which one it was."""
    if not torch.distributed.is_initialized():
        return None
    said = [match for each in causes(error) if (match := re.search(r"\brank (\d+): ", str(each)))]
    return int(said[0][1]) if said else torch.distributed.get_rank()


def _device(error: BaseException) -> Device:
    words = "DefaultCPUAllocator|bad_alloc|annot allocate|PyObject"
    if not isinstance(error, RuntimeError) or re.search(words, str(error)):
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

    def num_bytes(tensors: Iterable[torch.Tensor], anywhere: bool = False) -> int:
        once = {id(tensor): tensor for tensor in tensors}  # tables may be shared
        own = [_own(tensor) for tensor in once.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in own if anywhere or is_here(tensor))

    shards = own_shards(model)
    parameters = list(model.parameters()) if shards is None else shards
    trainable = [p for p in parameters if p.requires_grad]
    graded = trainable if keeps_gradients(model) else [p for p in trainable if p.grad is not None]
    states = optimizer.state if optimizer is not None else {}
    moments = [tensor for state in states.values() for tensor in state.values() if torch.is_tensor(tensor)]
    groups = optimizer.param_groups if optimizer is not None else []
    stateless = [_own(p) for group in groups for p in group["params"] if not states.get(p)]
    return Held(
        frozen=num_bytes([*(p for p in parameters if not p.requires_grad), *_quantisation(model)]),
        trainable=num_bytes(trainable),
        gradients=num_bytes(p if p.grad is None else p.grad for p in graded),
        optimizer=num_bytes(moments),
        gradients_to_come=num_bytes(trainable) - num_bytes(graded),
        optimizer_to_come=sum(_moments(p, in_8_bits) for p in stateless if is_here(p)),
        to_save=num_bytes([*trainable, *moments], anywhere=True),
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
