"""Measures what code asks of devices: bytes held by component, collectives, host synchronisations, copies, casts.

A ``Meter`` is a dispatch mode: it sees every operation below autograd and autocast, on fake tensors or real ones, in
forward and backward. It knows nothing of the kit, of tests, or of how the tensors came about.

How it counts:

- A storage counts from the first operation that shows it until it is freed, at its present size (FSDP2 frees gathered
  weights by resizing their storage to 0), once for all its views. Allocators round sizes up; the meter does not.
- A storage belongs to a component. ``label`` says to which, at any time while the storage lives: at the peak the
  components are summed by what is known at the end. What nobody labels is ``activations``, or ``logits`` where the last
  dimension is the vocabulary.
- A host synchronisation is an operation after which the host knows a number of the device: reading a scalar, a shape
  that depends on data, a copy from the device that the host waits for, waiting for a stream or an event.
- A copy from host to device is pageable unless its source is pinned: the host waits for it, whatever
  ``non_blocking`` says.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ACTIVATIONS, LOGITS, GRADIENTS, GATHERED = "activations", "logits", "gradients", "gathered weights"
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
    """What was counted between two moments. Lines are those of the code that asked, if the meter was told how to find it."""

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


class Meter(TorchDispatchMode):
    """Counts while it is entered. Enter it inside ``FakeTensorMode``, so that it sees operations first."""

    def __init__(self, vocab_size: int = 0, asked_by: Callable[[], str] = lambda: "") -> None:
        """
        Args:
            vocab_size: tensors whose last dimension has this size are logits.
            asked_by: returns the line of code that asks for the operation that runs.
        """
        super().__init__()
        self._vocab_size, self._asked_by = vocab_size, asked_by
        self._serials: dict[int, int] = {}  # the serial number of each live storage, by its address
        self._devices: dict[int, str] = {}  # type of device of each storage, by serial number
        self._labels: dict[int, str] = {}
        self._refs: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._pinned: set[int] = set()
        self._now: Counter[str] = Counter()
        self._journal: list[tuple[int, int]] = []  # (serial number, change of size), since the tally began
        self._begin_tally()

    # --- bytes

    def hold(self, tensors: Iterable[Any], component: str | None = None) -> None:
        """Count the storages of ``tensors`` from now on, as ``component`` if it is given."""
        for tensor in tensors:
            serial = self._add(tensor)
            if serial is not None and component:
                self._labels[serial] = component

    def held(self, device_type: str = "cuda") -> int:
        """Bytes held now on all devices of a type."""
        return self._now[device_type]

    def _add(self, tensor: Any) -> int | None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(tensor, torch.Tensor):
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._serials:
            return self._serials[address]
        if (device := _device(tensor).type) == "meta":
            return None
        serial = len(self._devices)
        self._serials[address], self._devices[serial] = serial, device
        self._refs[serial] = weakref.ref(storage, lambda _, a=address, s=serial: self._forget(a, s))
        if self._vocab_size and tensor.dim() and tensor.shape[-1] == self._vocab_size:
            self._labels[serial] = LOGITS
        self._change(serial, storage.nbytes())
        return serial

    def _change(self, serial: int, change: int) -> None:
        if not change:
            return
        device = self._devices[serial]
        self._sizes[serial] = self._sizes.get(serial, 0) + change
        self._now[device] += change
        self._journal.append((serial, change))
        if self._now[device] > self._tally.peaks.get(device, 0):
            self._tally.peaks[device] = self._now[device]
            self._peak_ends[device] = len(self._journal)

    def _forget(self, address: int, serial: int) -> None:
        self._serials.pop(address, None)
        self._refs.pop(serial, None)
        self._pinned.discard(serial)
        self._change(serial, -self._sizes.get(serial, 0))
        self._sizes.pop(serial, None)

    def watch_resizes(self) -> None:
        """Count the new sizes of storages that are resized, from now on and for good: no operation shows them."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            serial = self._serials.get(storage._cdata)
            if serial is not None:
                self._change(serial, storage.nbytes() - self._sizes.get(serial, 0))
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]

    # --- tallies

    def _begin_tally(self) -> None:
        self._tally = Tally(peaks=dict(self._now))
        self._at_begin = dict(self._sizes)
        self._journal = []
        self._peak_ends: dict[str, int] = dict.fromkeys(self._now, 0)
        self._marks: dict[str, int] = {}

    def mark(self, moment: str) -> None:
        """Remember what is held now, as ``moment``; of several such moments in a tally the last one counts."""
        self._marks[moment] = len(self._journal)

    def _parts(self, device: str, end: int) -> dict[str, int]:
        """Bytes on a type of device by component after ``end`` changes, largest first."""
        sizes = Counter(self._at_begin)
        for serial, change in self._journal[:end]:
            sizes[serial] += change
        parts: Counter[str] = Counter()
        for serial, size in sizes.items():
            if self._devices[serial] == device:
                parts[self._labels.get(serial, ACTIVATIONS)] += size
        return {name: size for name, size in parts.most_common() if size}

    @contextmanager
    def tally(self) -> Iterator[Tally]:
        """Count what happens in the ``with`` block; the peak begins at what is held at its begin."""
        self._begin_tally()
        tally = self._tally
        yield tally
        for device, end in self._peak_ends.items():
            tally.components[device] = self._parts(device, end)
            tally.moments[device] = {moment: self._parts(device, at) for moment, at in self._marks.items()}

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is _DEVICE:  # two of three calls, since fake tensors look theirs up in this way
            return _device(args[0])
        name = func._overloadpacket.__name__
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if name == "_pin_memory":
            return self._pin(torch.ops.aten.clone.default(args[0]))
        pinned = bool(kwargs.pop("pin_memory", False))
        tensors = list(_tensors((args, kwargs.values())))
        before = [(_device(tensor), tensor.dtype) for tensor in tensors] if name in _COPIES else []
        self._count(func, name, args, tensors)
        result = self._answer(func, name, args, kwargs)
        if (formula := _FLOPS.get(func._overloadpacket)) is not None:
            self._tally.flops += formula(*args, **kwargs, out_val=result)
        self.hold(_tensors((result, kwargs.get("out"))), _LABELLED_OUTPUTS.get(name))
        if name in _LABELLED_INPUTS:
            self.hold(tensors, _LABELLED_INPUTS[name])
        if before:
            self._count_copy(name, args, kwargs, before, result)
        return self._pin(result) if pinned else result

    def _answer(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call the operation, or answer what a fake tensor cannot: a number, or a shape."""
        if name in _WAITS_FOR_VALUE and _is_fake(args[0]):
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if name == "nonzero" and _is_fake(args[0]):  # at most every element
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        return func(*args, **kwargs)

    def _count(self, func: Any, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        tally = self._tally
        if name in _WAITS_FOR_VALUE | _WAITS_FOR_SHAPE and _device(tensors[0]).type != "cpu":
            tally.syncs[f"{name} {self._asked_by()}"] += 1
        elif name in ("index", "index_put_", "index_put") and _device(tensors[0]).type != "cpu":
            for index in tensors[1:]:
                if index.dtype == torch.bool:
                    tally.syncs[f"{name} by bool {self._asked_by()}"] += 1
                elif _device(index).type == "cpu" and index.dim():
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
            if not self._is_pinned(origin):
                self._tally.pageable[f"{name} {self._asked_by()}"] += 1
        elif to_device == "cpu" and from_device not in ("cpu", "meta"):
            if name == "_to_copy" and not waits:
                self._pin(result)  # as torch does
            if waits or not self._is_pinned(result):
                self._tally.syncs[f"copy to the host {self._asked_by()}"] += 1
        if source[1] != target[1]:
            self._tally.casts[f"{_short(source[1])} to {_short(target[1])}"] += 1

    def waited(self, what: str) -> None:
        """Count that the host waited for a stream, an event or the whole device."""
        self._tally.syncs[f"{what} {self._asked_by()}"] += 1

    # --- pinned memory, which fake tensors do not have

    def _pin(self, tensor: Any) -> Any:
        serial = self._add(tensor)
        if serial is not None:
            self._pinned.add(serial)
        return tensor

    def pinned(self, address: int) -> None:
        """Note that the storage at ``address`` was pinned in place."""
        self._pinned.add(self._serials[address])

    def _is_pinned(self, tensor: Any) -> bool:
        tensor = getattr(tensor, "_local_tensor", tensor)
        return self._serials.get(tensor.untyped_storage()._cdata) in self._pinned


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples of arguments. torch's own search takes several times as long."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | ValuesView):
            yield from _tensors(value)


def _device(tensor: Any) -> torch.device:
    """The device of a tensor. Of a fake one it is an attribute; ``device`` would be an operation."""
    return getattr(tensor, "fake_device", None) or tensor.device


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
