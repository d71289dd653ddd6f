"""Measures what code asks of devices: bytes held by component, collectives, host synchronisations, copies, casts.

A ``Meter`` is a dispatch mode: it sees every operation below autograd and autocast, on fake tensors or real ones, in
forward and backward, and the storages (``kit.tools.plan.storages``) of their inputs and results. It knows nothing of
the kit, of tests, or of how the tensors came about.

- A host synchronisation is an operation after which the host knows a number of the device: reading a scalar, a shape
  that depends on data, a copy from the device that the host waits for, waiting for a stream or an event.
- A copy from host to device is pageable unless its source is pinned: the host waits for it, whatever
  ``non_blocking`` says.
"""

from collections import Counter
from collections.abc import Callable, Iterator, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kit.tools.plan.storages import GATHERED, GRADIENTS, Storages, device_of

# Operations whose result's shape is in the device's data, so that the host waits for it.
_WAITS_FOR_SHAPE = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"}
_WAITS_FOR_VALUE = {"_local_scalar_dense", "is_nonzero", "equal"}
_COPIES = {"_to_copy", "copy_"}
# Matrix products, whose dtype decides which units of a GPU work.
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_DEVICE = torch.ops.prim.device.default
# torch has no formulas for attention on a CPU.
_FLOPS = {
    **flop_registry,
    **{
        getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{way}"): flop_registry[
            getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{way}")
        ]
        for way in ("", "_backward")
    },
}
# What collectives, and FSDP2's copies between them and tensors, read and write: gradients, or gathered weights.
_LABELLED_INPUTS = {
    "chunk_cat": GRADIENTS,
    "_chunk_cat": GRADIENTS,
    "_reduce_scatter_base_": GRADIENTS,
    "allreduce_": GRADIENTS,
    "_allgather_base_": GATHERED,
}
_LABELLED_OUTPUTS = {
    "chunk_cat": GRADIENTS,
    "_chunk_cat": GRADIENTS,
    "all_gather_copy_in": GATHERED,
    "split_with_sizes_copy": GATHERED,
    "dequantize_4bit": "dequantised weights",
}


@dataclass
class Tally:
    """What was counted between two moments. Lines are those of the code that asked, if the meter can find it."""

    syncs: Counter[str] = field(default_factory=Counter)  # host synchronisations, by operation and lines
    pageable: Counter[str] = field(default_factory=Counter)  # copies host to device from pageable memory
    casts: Counter[str] = field(default_factory=Counter)  # copies that change the dtype, by the dtypes
    products: Counter[str] = field(default_factory=Counter)  # matrix products by dtype; of wide ones the lines too
    attention: Counter[str] = field(default_factory=Counter)  # attention kernels by operation
    collectives: Counter[str] = field(default_factory=Counter)  # number of calls, by operation
    collective_bytes: Counter[str] = field(default_factory=Counter)  # bytes that the rank holds after them
    flops: int = 0  # of matrix products and attention; attention without regard to its mask, as torch counts
    peaks: dict[str, int] = field(default_factory=dict)  # bytes by type of device
    components: dict[str, dict[str, int]] = field(default_factory=dict)  # what the peak consists of
    moments: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # the same at each moment of ``mark``


def _nobody() -> str:
    return ""


class Meter(Storages, TorchDispatchMode):
    """Counts while it is entered. Enter it inside ``FakeTensorMode``, so that it sees operations first."""

    def __init__(self, vocab_size: int = 0, asked_by: Callable[[], str] = _nobody) -> None:
        """
        Args:
            vocab_size: tensors whose last dimension has this size are logits.
            asked_by: returns the line of code that asks for the operation that runs.
        """
        Storages.__init__(self, vocab_size)
        TorchDispatchMode.__init__(self)
        self._asked_by = asked_by
        self._tally = Tally()

    @contextmanager
    def tally(self) -> Iterator[Tally]:
        """Count what happens in the ``with`` block; the peak begins at what is held at its begin."""
        self._tally = tally = Tally()
        self.begin()
        yield tally
        tally.peaks, tally.components, tally.moments = self.peaks(), self.at_peaks(), self.at_marks()

    def waited(self, what: str) -> None:
        """Count that the host waited for a stream, an event or the whole device."""
        self._tally.syncs[f"{what} {self._asked_by()}"] += 1

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is _DEVICE:  # two of three calls, since fake tensors look theirs up in this way
            return device_of(args[0])
        name = func._overloadpacket.__name__
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "_pin_memory":
            return self.pin(torch.ops.aten.clone.default(args[0]))
        pinned = bool(kwargs.pop("pin_memory", False))
        tensors = list(_tensors((args, kwargs.values())))
        before = [(device_of(tensor), tensor.dtype) for tensor in tensors] if name in _COPIES else []
        self._count(func, name, args, tensors)
        result = self._answer(func, name, args, kwargs)
        if (formula := _FLOPS.get(func._overloadpacket)) is not None:
            self._tally.flops += formula(*args, **kwargs, out_val=result)
        self.hold(_tensors((result, kwargs.get("out"))), _LABELLED_OUTPUTS.get(name))
        if name in _LABELLED_INPUTS:
            self.hold(tensors, _LABELLED_INPUTS[name])
        if before:
            self._count_copy(name, args, kwargs, before, result)
        return self.pin(result) if pinned else result

    def _answer(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call the operation, or answer what a fake tensor cannot: a number, or a shape."""
        if name in _WAITS_FOR_VALUE and _is_fake(args[0]):
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if name == "nonzero" and _is_fake(args[0]):  # at most every element
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        return func(*args, **kwargs)

    def _count(self, func: Any, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        tally = self._tally
        if name in _WAITS_FOR_VALUE | _WAITS_FOR_SHAPE and device_of(tensors[0]).type != "cpu":
            tally.syncs[f"{name} {self._asked_by()}"] += 1
        elif name in ("index", "index_put_", "index_put") and device_of(tensors[0]).type != "cpu":
            for index in tensors[1:]:
                if index.dtype == torch.bool:
                    tally.syncs[f"{name} by bool {self._asked_by()}"] += 1
                elif device_of(index).type == "cpu" and index.dim():
                    tally.pageable[f"{name} {self._asked_by()}"] += 1
        elif name in _PRODUCTS:
            dtype = tensors[-1].dtype
            by = f" {self._asked_by()}" if dtype.itemsize > 2 else ""
            tally.products[f"{_short(dtype)}{by}"] += 1
        elif "attention" in name or "attn" in name:
            tally.attention[name.removeprefix("_")] += 1
        elif func.namespace == "c10d":
            # The largest buffer: of an all-gather its output, of a reduce-scatter its input.
            size = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
            tally.collectives[name.strip("_")] += 1
            tally.collective_bytes[name.strip("_")] += size

    def _count_copy(
        self, name: str, args: Any, kwargs: Any, before: list[tuple[torch.device, torch.dtype]], result: Any
    ) -> None:
        source, target = (before[1], before[0]) if name == "copy_" else (before[0], (result.device, result.dtype))
        origin = args[1] if name == "copy_" else args[0]
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        from_device, to_device = source[0].type, target[0].type
        if from_device == "cpu" and to_device not in ("cpu", "meta"):
            if not self.is_pinned(origin):
                self._tally.pageable[f"{name} {self._asked_by()}"] += 1
        elif to_device == "cpu" and from_device not in ("cpu", "meta"):
            if name == "_to_copy" and not waits:
                self.pin(result)  # as torch does
            if waits or not self.is_pinned(result):
                self._tally.syncs[f"copy to the host {self._asked_by()}"] += 1
        if source[1] != target[1]:
            self._tally.casts[f"{_short(source[1])} to {_short(target[1])}"] += 1


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples of arguments. torch's own search takes several times as long."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | ValuesView):
            yield from _tensors(value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
