"""Out of memory: how much was requested, by which part of the run, and what fills the memory.

Promises: every tensor on the device that ran out counts once, in one component; of a sharded tensor only this rank's
shard counts. Measuring allocates almost nothing, and needs no other rank.
"""

import re
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil
import torch

from kit.errors import causes, out_of_memory
from kit.memory.formulas import FOUR_BIT, FROZEN, GATHERED, GRADIENTS, OPTIMISER, TRAINABLE, Memory
from kit.memory.sizes import UNITS, format_bytes
from kit.phases import BY_FUNCTION, COMPARING, EVALUATING, FORWARD, TRAINING, Phase
from kit.strategy.gradients import keeps_gradients
from kit.strategy.weights import gathered_weights, own_shards

# Modules of these packages are not named in messages: a model has hundreds of `Linear`, but the class that contains it
# says which one it is.
_ANONYMOUS = ("torch.nn.", "peft.", "bitsandbytes.")
_SIZE = rf"([\d.]+) ({'|'.join(UNITS)})"  # a number of bytes in a message
COMPONENTS = (FROZEN, TRAINABLE, GRADIENTS, OPTIMISER, GATHERED)
REST = "activations, logits, the rest"


@dataclass(frozen=True)
class Device:
    """Bytes on the device that ran out of memory."""

    name: str
    total: int
    free: int
    peak: int  # highest use by this process: allocated on a GPU, resident on a CPU
    unused: int = 0  # reserved by torch's GPU allocator but unused: the pieces are too small for the request
    others: int = 0  # used on the GPU by other processes
    limit: int = 0  # of this process on a CPU, as `ulimit` sets it; 0: none

    @property
    def is_cpu(self) -> bool:
        """Whether the CPU's memory ran out."""
        return self.name == "CPU"

    def __str__(self) -> str:
        """Describe it in a line."""
        parts = [f"{self.name}: {format_bytes(self.total)}", f"{format_bytes(self.free)} free"]
        if self.others:
            parts.append(f"{format_bytes(self.others)} used by other processes")
        if self.unused:
            parts.append(f"{format_bytes(self.unused)} lost between tensors")
        if self.limit:
            parts.append(f"this process may reserve {format_bytes(self.limit)} (ulimit)")
        return ", ".join(parts)


@dataclass(frozen=True)
class Shortage:
    """A lack of memory: what the run was doing, what it requested, and what filled the memory."""

    phase: Phase
    module: str  # class of the innermost named module that was running; empty if none was
    asked: int  # bytes requested; 0 if unknown
    device: Device
    held: dict[str, int]  # bytes that this process holds there, by ``COMPONENTS``
    rank: int | None  # the rank that failed; None with a single process

    def lines(self, planned: Memory | None) -> list[str]:
        """Describe it for the user: what was requested, and a table of what was taken beside what was planned.

        Args:
            planned: of the run on such a GPU; None: there is no plan.
        """
        rank = f"rank {self.rank}: " if self.rank is not None else ""
        requested = f"{format_bytes(self.asked)} asked for " if self.asked else ""
        module = f" ({self.module})" if self.module else ""
        lines = [f"{rank}{requested}in {self.phase.noun}{module}", str(self.device)]
        taken = {**self.held, REST: max(0, self.device.peak - sum(self.held.values()))}
        plan: dict[str, int] = {}
        if planned:
            plan = dict.fromkeys(taken, 0)
            for name, size in planned.components.items():
                plan[FROZEN if name == FOUR_BIT else name if name in self.held else REST] += size
        rows = [(name, size, plan.get(name, 0)) for name, size in taken.items() if size or plan.get(name)]
        rows.append(("peak of this process", self.device.peak, sum(plan.values())))
        lines.append(f"{'':30}{'taken':>12}{'planned' if plan else '':>12}".rstrip())
        for name, size, expected in rows:
            beside = format_bytes(expected) if plan else ""
            lines.append(f"{name:30}{format_bytes(size):>12}{beside:>12}".rstrip())
        return lines


def find_shortage(
    error: BaseException, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Shortage | None:
    """Return what ``error`` and the current memory show; None if no cause of ``error`` is about memory.

    Called by the rank that failed, while the traceback of ``error`` exists: it shows what the run was doing.

    Args:
        model: None if it does not exist yet. It may be changed (resharded), and must not be used afterwards.
        optimizer: None if it does not exist yet.
    """
    cause = out_of_memory(error)
    if cause is None:
        return None
    phase, module = _phase_and_module(error)
    device = _device(cause)
    return Shortage(
        phase,
        module,
        asked=_bytes_in_message(cause, rf"(?:allocate|mmap) {_SIZE}"),
        device=device,
        held=components(model, optimizer, device.is_cpu),
        rank=_rank(error),
    )


def _bytes_in_message(error: BaseException, pattern: str) -> int:
    """The bytes that ``pattern`` finds in an error message of torch or numpy; 0 if it finds none."""
    match = re.search(pattern, str(error))
    return int(float(match[1]) * UNITS[match[2]]) if match else 0


def _phase_and_module(error: BaseException) -> tuple[Phase, str]:
    """The phase of the run, and the class of the module that was running: ``(BACKWARD, "LlamaMLP")``."""
    phase: Phase | None = None
    module = ""
    for cause in causes(error):
        traceback = cause.__traceback__
        while traceback is not None:
            frame, traceback = traceback.tb_frame, traceback.tb_next
            name, owner = _name(frame), frame.f_locals.get("self")
            # The innermost one counts. But an evaluation compares with the reference too, and has other batches.
            if name in BY_FUNCTION and not (BY_FUNCTION[name] is COMPARING and phase is EVALUATING):
                phase, module = BY_FUNCTION[name], ""
            if name in ("kit.model.loss_head.chunk_loss", "kit.model.loss_head._loss_and_gradient"):
                module = "logits"
            elif frame.f_code.co_name == "forward" and isinstance(owner, torch.nn.Module):
                is_named = not type(owner).__module__.startswith(_ANONYMOUS)
                module = type(owner).__name__.removeprefix("FSDP") if is_named else module
    return phase or (FORWARD if module else TRAINING), module


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"


def _rank(error: BaseException) -> int | None:
    """The rank that failed: this one, or the rank that the message names; a failed save is raised on all ranks."""
    if not torch.distributed.is_initialized():
        return None
    for cause in causes(error):
        match = re.search(r"\brank (\d+): ", str(cause))
        if match:
            return int(match[1])
    return torch.distributed.get_rank()


def _device(error: BaseException) -> Device:
    words = "DefaultCPUAllocator|bad_alloc|annot allocate|PyObject"
    if not isinstance(error, RuntimeError) or re.search(words, str(error)):
        memory = psutil.virtual_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
        limit = min((limit for limit in limits if 0 < limit < memory.total), default=0)
        return Device("CPU", memory.total, memory.available, peak, limit=limit)
    free = total = peak = unused = in_use = index = 0
    if torch.backends.mps.is_available():
        peak = in_use = torch.mps.driver_allocated_memory()
        unused = in_use - torch.mps.current_allocated_memory()
        total = torch.mps.recommended_max_memory()
        free = max(0, total - in_use)
    elif torch.accelerator.is_available():
        index = torch.accelerator.current_device_index()
        peak, in_use = torch.accelerator.max_memory_allocated(), torch.accelerator.memory_reserved()
        unused = in_use - torch.accelerator.memory_allocated()
        free, total = torch.accelerator.get_memory_info()
    # Prefer the numbers in the message: they are from the moment of the failure, and tensors were freed since.
    total = _bytes_in_message(error, f"total capacity of {_SIZE}") or total
    free = _bytes_in_message(error, f"of which {_SIZE} is free") or free
    in_use = _bytes_in_message(error, f"this process has {_SIZE}") or in_use
    peak = max(peak, _bytes_in_message(error, f"{_SIZE} is allocated by PyTorch"))
    unused = _bytes_in_message(error, f"{_SIZE} is reserved by PyTorch but unallocated") or unused
    return Device(f"GPU {index}", total, free, peak, unused, max(0, total - free - in_use))


def components(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, on_cpu: bool) -> dict[str, int]:
    """Measure what this process holds, by ``COMPONENTS``; of a sharded tensor only its own shard.

    Args:
        on_cpu: measure the CPU's memory; else the GPU's.
    """
    if model is None:
        return dict.fromkeys(COMPONENTS, 0)

    def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
        once = {id(tensor): tensor for tensor in tensors}  # quantisation tables may be shared between weights
        own = [_own(tensor) for tensor in once.values()]
        here = [tensor for tensor in own if (tensor.device.type == "cpu") == on_cpu and not tensor.is_meta]
        return sum(tensor.numel() * tensor.element_size() for tensor in here)

    gathered = num_bytes(gathered_weights(model))
    shards = own_shards(model)
    parameters = list(model.parameters()) if shards is None else shards
    trainable = [p for p in parameters if p.requires_grad]
    graded = trainable if keeps_gradients(model) else [p for p in trainable if p.grad is not None]
    states = optimizer.state if optimizer is not None else {}
    return {
        FROZEN: num_bytes([*(p for p in parameters if not p.requires_grad), *_quantisation(model)]),
        TRAINABLE: num_bytes(trainable),
        GRADIENTS: num_bytes(p if p.grad is None else p.grad for p in graded),
        OPTIMISER: num_bytes(each for state in states.values() for each in state.values() if torch.is_tensor(each)),
        GATHERED: gathered,
    }


@torch.no_grad()
def _own(tensor: Any) -> torch.Tensor:
    """This rank's shard of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _quantisation(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The scales and tables of all 4-bit weights. The scales may themselves be quantised, with scales of their own."""
    states = [module.quant_state for module in model.modules() if getattr(module, "quant_state", None) is not None]
    for state in states:
        for value in vars(state).values():
            if torch.is_tensor(value):
                yield value
            elif hasattr(value, "absmax"):
                states.append(value)
