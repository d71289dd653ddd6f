"""Measures also what code asks of a GPU beside memory: host synchronisations, copies, kernels.

- A host synchronisation is an operation after which the host knows a number of the device: reading a scalar, a shape
  that depends on data, a copy from the device that the host waits for, waiting for a stream or an event.
- A copy from host to device is pageable unless its source is pinned: the host waits for it, whatever
  ``non_blocking`` says.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.simulation.meter import DEVICE, WAITS_FOR_VALUE, Meter, Tally, tensors_in
from benchmarks.simulation.storages import device_of

# Operations whose result's shape is in the device's data, so that the host waits for it.
_WAITS_FOR_SHAPE = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"}
_COPIES = {"_to_copy", "copy_"}
# Matrix products, whose dtype decides which units of a GPU work.
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}


@dataclass
class GpuTally(Tally):
    """What was counted between two moments. Lines are those of the code that asked, if the meter can find it."""

    syncs: Counter[str] = field(default_factory=Counter)  # host synchronisations, by operation and lines
    pageable: Counter[str] = field(default_factory=Counter)  # copies host to device from pageable memory
    products: Counter[str] = field(default_factory=Counter)  # matrix products by dtype; of wide ones the lines too
    attention: Counter[str] = field(default_factory=Counter)  # attention kernels by operation


class GpuMeter(Meter):
    """Counts while it is entered, as ``Meter`` does."""

    _tally: GpuTally

    def __init__(self, vocab_size: int = 0, asked_by: Callable[[], str] = lambda: "") -> None:
        """
        Args:
            vocab_size: tensors whose last dimension has this size are logits.
            asked_by: returns the line of code that asks for the operation that runs.
        """
        super().__init__(vocab_size)
        self._asked_by = asked_by
        self._pinned: set[int] = set()  # serial numbers of storages

    def new_tally(self) -> GpuTally:
        """See ``Meter``."""
        return GpuTally()

    def waited(self, what: str) -> None:
        """Count that the host waited for a stream, an event or the whole device."""
        self._tally.syncs[f"{what} {self._asked_by()}"] += 1

    def pin(self, tensor: Any) -> Any:
        """Note that a tensor is in pinned memory, which fake tensors do not have, and return it."""
        serial = self._add(tensor)
        if serial is not None:
            self._pinned.add(serial)
        return tensor

    def pinned(self, address: int) -> None:
        """Note that the storage at ``address`` was pinned in place."""
        self._pinned.add(self._serials[address])

    def is_pinned(self, tensor: Any) -> bool:
        """Return whether a tensor is in pinned memory."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        return self._serials.get(tensor.untyped_storage()._cdata) in self._pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return device_of(args[0])
        kwargs = dict(kwargs or {})
        name = func._overloadpacket.__name__
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "_pin_memory":
            return self.pin(torch.ops.aten.clone.default(args[0]))
        pinned = bool(kwargs.pop("pin_memory", False))
        tensors = list(tensors_in((args, kwargs.values())))
        before = [device_of(tensor).type for tensor in tensors] if name in _COPIES else []
        self._count_request(name, tensors)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if before:
            self._count_copy(name, args, kwargs, before, result)
        return self.pin(result) if pinned else result

    def _count_request(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Count synchronisations, copies of an index, products and attention."""
        tally = self._tally
        if name in WAITS_FOR_VALUE | _WAITS_FOR_SHAPE and device_of(tensors[0]).type != "cpu":
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

    def _count_copy(self, name: str, args: Any, kwargs: Any, before: list[str], result: Any) -> None:
        """Count a copy. ``before``: the devices of its tensors."""
        source, target = (before[1], before[0]) if name == "copy_" else (before[0], result.device.type)
        origin = args[1] if name == "copy_" else args[0]
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if source == "cpu" and target not in ("cpu", "meta"):
            if not self.is_pinned(origin):
                self._tally.pageable[f"{name} {self._asked_by()}"] += 1
        elif target == "cpu" and source not in ("cpu", "meta"):
            if name == "_to_copy" and not waits:
                self.pin(result)  # as torch does
            if waits or not self.is_pinned(result):
                self._tally.syncs[f"copy to the host {self._asked_by()}"] += 1


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
