"""Out of memory: how much was requested, by which part of the run, and what fills the memory.

Promises: every tensor on the device that ran out counts once, in one component; of a sharded tensor only this rank's
shard counts. Measuring allocates almost nothing, and needs no other rank.
"""

import re
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import torch

from kit.config.optimisers import OPTIMISERS
from kit.errors import causes, out_of_memory
from kit.memory.sizes import GRADIENT_BYTES, UNITS, format_bytes
from kit.phases import BY_FUNCTION, COMPARING, EVALUATING, FORWARD, LOADING, SAVING, TRAINING, Phase
from kit.strategy.gradients import keeps_gradients
from kit.strategy.weights import gathered_weights, own_shards, rank_and_world

if TYPE_CHECKING:
    from kit.config.settings.optimisation import OptimSettings
    from kit.strategy.topology import Topology

_IN_BACKGROUND = "kit.checkpoint.save._complete"
# Modules of these packages are not named in messages: a model has hundreds of `Linear`, but the class that contains it
# says which one it is.
_ANONYMOUS = ("torch.nn.", "peft.", "bitsandbytes.")

_SIZE = rf"([\d.]+) ({'|'.join(UNITS)})"  # a number of bytes in a message


@dataclass(frozen=True)
class Held:
    """Bytes that this process holds on one device, by component."""

    frozen: int = 0  # frozen weights, with the quantisation state of 4-bit weights
    trainable: int = 0  # trainable weights
    gradients: int = 0
    optimizer: int = 0  # optimiser state
    gradients_to_come: int = 0  # gradients that the failed step had still to allocate
    optimizer_to_come: int = 0  # optimiser state that the failed step had still to allocate
    gathered: int = 0  # whole layers that FSDP has gathered for the pass that failed
    to_save: int = 0  # size of this rank's copy of a checkpoint's tensors, whatever device the originals are on
    sharded: bool = False  # whether these are the shards of this rank only

    @property
    def total(self) -> int:
        """Bytes of weights, gradients, optimiser state and gathered layers."""
        return self.frozen + self.trainable + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True)
class Device:
    """Bytes on the device that ran out of memory."""

    name: str
    total: int
    free: int
    peak: int  # highest use by this process: allocated on a GPU, resident on a CPU
    unused: int = 0  # reserved by torch's GPU allocator but unused: the pieces are too small for the request
    others: int = 0  # used on the GPU by other processes
    limit: tuple[int, str] | None = None  # of this process on a CPU: bytes, and the option of ulimit that sets it

    @property
    def is_cpu(self) -> bool:
        """Whether the CPU's memory ran out."""
        return self.name == "CPU"


@dataclass(frozen=True)
class Shortage:
    """A lack of memory: what the run was doing, what it requested, and what filled the memory."""

    phase: Phase
    module: str  # class of the innermost named module that was running; empty if none was
    asked: int  # bytes requested; 0 if unknown
    device: Device
    held: Held
    rank: int | None  # the rank that failed; None with a single process
    trains_here: bool  # whether the model trains on the device that ran out
    is_saving: bool  # whether a checkpoint is being written, in the background or not

    def lines(self) -> list[str]:
        """Describe it for the user: a line with what was requested, and a table of what fills the memory."""
        held, device = self.held, self.device
        rank = f"rank {self.rank}: " if self.rank is not None else ""
        requested = f"{format_bytes(self.asked)} asked for " if self.asked else ""
        module = f" ({self.module})" if self.module else ""
        free = f"{format_bytes(device.free)} free"
        if device.limit:
            limit, option = device.limit
            free += f"; this process may reserve {format_bytes(limit)} (ulimit {option})"
        peak = "resident" if device.is_cpu else "allocated"
        if device.unused:
            peak += f", and {format_bytes(device.unused)} lost between tensors"
        gradients = optimizer = ""
        if self.phase.mid_step:
            gradients, optimizer = _to_come(held.gradients_to_come), _to_come(held.optimizer_to_come)
        rows = [
            (device.name, device.total, free),
            ("peak of this process", device.peak, peak),
            ("  frozen weights", held.frozen, ""),
            ("  trainable weights", held.trainable, ""),
            ("  gradients", held.gradients, gradients),
            ("  optimiser state", held.optimizer, optimizer),
            ("  gathered layers", held.gathered, ""),
            ("  the rest", max(0, device.peak - held.total), ", ".join(self._rest())),
        ]
        lines = [f"{rank}{requested}in {self.phase.noun}{module}"]
        for name, num_bytes, note in rows:
            if num_bytes or note.endswith("to come in this step"):
                lines.append(f"{name:20}  {format_bytes(num_bytes):>10}  {note}".rstrip())
        return lines

    def _rest(self) -> list[str]:
        """What takes the memory that no component has."""
        rest = []
        if self.phase is LOADING:
            rest.append("what is being loaded")
        elif self.trains_here:
            rest.append("activations, logits, buffers")
        if self.device.is_cpu:
            rest.append("Python, libraries")
            if self.is_saving:
                rest.append("a save in progress")
        return rest


def _to_come(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} still to come in this step" if num_bytes else ""


def find_shortage(
    error: BaseException,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    settings: "OptimSettings",
    topology: "Topology",
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
    held = components(model, optimizer, device.is_cpu, settings.optim)
    in_background = (_IN_BACKGROUND in _calls(frame) for frame in sys._current_frames().values())
    return Shortage(
        phase,
        module,
        asked=_bytes_in_message(cause, rf"(?:allocate|mmap) {_SIZE}"),
        device=device,
        held=_with_accumulated(held, model, settings.sync_each_batch),
        rank=_rank(error),
        trains_here=device.is_cpu == (topology.device_type == "cpu"),
        is_saving=phase is SAVING or any(in_background),
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


def _calls(frame: FrameType | None) -> Iterator[str]:
    """Names of the function that a thread is in and of its callers, innermost first."""
    while frame is not None:
        yield _name(frame)
        frame = frame.f_back


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
        options = {"-d": resource.RLIMIT_DATA, "-v": resource.RLIMIT_AS}
        limits = [(resource.getrlimit(kind)[0], option) for option, kind in options.items()]
        limit = min((limit for limit in limits if 0 < limit[0] < memory.total), default=None)
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


def components(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, on_cpu: bool, optim: str
) -> Held:
    """Measure what this process holds, by component; of a sharded tensor only its own shard.

    Args:
        on_cpu: measure the CPU's memory; else the GPU's.
        optim: the setting, for the size of states that are not yet there.
    """
    if model is None:
        return Held()

    def is_here(tensor: torch.Tensor) -> bool:
        return (tensor.device.type == "cpu") == on_cpu and not tensor.is_meta

    def num_bytes(tensors: Iterable[torch.Tensor], anywhere: bool = False) -> int:
        once = {id(tensor): tensor for tensor in tensors}  # quantisation tables may be shared between weights
        own = [_own(tensor) for tensor in once.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in own if anywhere or is_here(tensor))

    gathered = num_bytes(gathered_weights(model))
    shards = own_shards(model)
    parameters = list(model.parameters()) if shards is None else shards
    trainable = [p for p in parameters if p.requires_grad]
    graded = trainable if keeps_gradients(model) else [p for p in trainable if p.grad is not None]
    states = optimizer.state if optimizer is not None else {}
    moments = [tensor for state in states.values() for tensor in state.values() if torch.is_tensor(tensor)]
    groups = optimizer.param_groups if optimizer is not None else []
    stateless = [
        (_own(p), 1 if "ns_steps" in group else OPTIMISERS[optim].num_moments)  # muon has one of a matrix
        for group in groups
        for p in group["params"]
        if not states.get(p)
    ]
    return Held(
        frozen=num_bytes([*(p for p in parameters if not p.requires_grad), *_quantisation(model)]),
        trainable=num_bytes(trainable),
        gradients=num_bytes(p if p.grad is None else p.grad for p in graded),
        optimizer=num_bytes(moments),
        gradients_to_come=num_bytes(trainable) - num_bytes(graded),
        optimizer_to_come=sum(_moments(p, number, optim) for p, number in stateless if is_here(p)),
        gathered=gathered,
        # What every rank holds whole, only one of them copies and writes.
        to_save=num_bytes([*trainable, *moments], anywhere=True) // (1 if shards is not None else rank_and_world()[1]),
        sharded=shards is not None,
    )


def _with_accumulated(held: Held, model: torch.nn.Module | None, sync_each_batch: bool | None) -> Held:
    """``held`` with the float32 gradients of the whole model that ``sync_each_batch`` false keeps under FSDP."""
    if model is None or not held.sharded or sync_each_batch is not False:
        return held
    whole = sum(GRADIENT_BYTES * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return replace(held, gradients=held.gradients + whole)


@torch.no_grad()
def _own(tensor: Any) -> torch.Tensor:
    """This rank's shard of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _moments(parameter: torch.Tensor, number: int, optim: str) -> int:
    """Bytes of the moments to be made for ``parameter``; bitsandbytes quantises those of 4,096 elements or more."""
    in_8_bits = OPTIMISERS[optim].in_8_bits and parameter.numel() >= 4096
    return number * parameter.numel() * (1 if in_8_bits else parameter.element_size())


def _quantisation(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The scales and tables of all 4-bit weights. The scales may themselves be quantised, with scales of their own."""
    states = [module.quant_state for module in model.modules() if getattr(module, "quant_state", None) is not None]
    for state in states:
        for value in vars(state).values():
            if torch.is_tensor(value):
                yield value
            elif hasattr(value, "absmax"):
                states.append(value)
