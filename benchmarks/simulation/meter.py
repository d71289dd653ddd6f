"""Measures what code asks of devices: bytes held by component, collectives and their bytes, operations, launches.

A ``Meter`` is a dispatch mode: it sees every operation below autograd and autocast, on fake tensors or real ones, in
forward and backward, and the storages (``storages.py``) of their inputs and results. It knows nothing of
the kit, of tests, or of how the tensors were made.
"""

from collections import Counter
from collections.abc import Iterator, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.simulation.storages import GATHERED, GRADIENTS, Storages, device_of

WAITS_FOR_VALUE = {"_local_scalar_dense", "is_nonzero", "equal"}  # operations that return a number of the device
DEVICE = torch.ops.prim.device.default
# They launch no kernel, although torch does not mark them as views.
_NO_LAUNCH = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "resize_",
    "set_",
}
# torch has no formulas for a product that is added in place, and for attention on a CPU.
FLOPS = {
    **flop_registry,
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    **{
        getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{way}"): flop_registry[
            getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{way}")
        ]
        for way in ("", "_backward")
    },
}
# What collectives, and FSDP2's copies between them and tensors, read and write: gradients, or unsharded weights.
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
    """What was counted between two moments."""

    collectives: Counter[str] = field(default_factory=Counter)  # number of calls, by operation
    collective_bytes: Counter[str] = field(default_factory=Counter)  # bytes that the rank holds after them
    flops: int = 0  # of matrix products and attention; attention without regard to its mask, as torch counts
    waits: int = 0  # of the host for a number of the device
    launches: int = 0  # of kernels, one for each operation that computes or copies something
    elementwise_bytes: int = 0  # that these read and write, but for those that ``flops`` counts
    product_sizes: list[tuple[int, int]] = field(default_factory=list)  # flops and bytes of each of the latter
    peaks: dict[str, int] = field(default_factory=dict)  # bytes by type of device
    components: dict[str, dict[str, int]] = field(default_factory=dict)  # what the peak consists of
    moments: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # the same at each moment of ``mark``


class Meter(Storages, TorchDispatchMode):
    """Counts while it is entered. Enter it inside ``FakeTensorMode``, so that it sees operations first."""

    def __init__(self, vocab_size: int = 0) -> None:
        """
        Args:
            vocab_size: tensors whose last dimension has this size are logits.
        """
        Storages.__init__(self, vocab_size)
        TorchDispatchMode.__init__(self)
        self._tally = self.new_tally()

    def new_tally(self) -> Tally:
        """Return a tally in which nothing is counted yet."""
        return Tally()

    @contextmanager
    def tally(self) -> Iterator[Any]:
        """Count what happens in the ``with`` block; the peak begins at what is held at its begin."""
        self._tally = tally = self.new_tally()
        self.begin()
        yield tally
        tally.peaks, tally.components, tally.moments = self.peaks(), self.at_peaks(), self.at_marks()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do and count one operation."""
        kwargs = kwargs or {}
        if func is DEVICE:  # two of three calls, since fake tensors look up their device in this way
            return device_of(args[0])
        name = func._overloadpacket.__name__
        if func.namespace == "c10d":
            # The largest buffer: of an all-gather its output, of a reduce-scatter its input.
            sizes = (tensor.numel() * tensor.element_size() for tensor in tensors_in((args, kwargs.values())))
            self._tally.collectives[name.strip("_")] += 1
            self._tally.collective_bytes[name.strip("_")] += max(sizes, default=0)
        result = self._answer(func, name, args, kwargs)
        formula = FLOPS.get(func._overloadpacket)
        if func.namespace != "c10d" and not func.is_view and name not in _NO_LAUNCH:
            self._tally.launches += 1
            written = args[:1] if result is None else result
            size = sum(map(_num_bytes, tensors_in((args, kwargs.values(), written))))
            if formula is None:
                self._tally.elementwise_bytes += size
            else:
                flops = formula(*args, **kwargs, out_val=result)
                self._tally.flops += flops
                self._tally.product_sizes.append((flops, size))
        self.hold(tensors_in((result, kwargs.get("out"))), _LABELLED_OUTPUTS.get(name))
        if name in _LABELLED_INPUTS:
            self.hold(tensors_in((args, kwargs.values())), _LABELLED_INPUTS[name])
        return result

    def _answer(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call the operation, or answer what a fake tensor cannot: a number, or a shape."""
        if name in WAITS_FOR_VALUE and isinstance(args[0], FakeTensor):
            self._tally.waits += 1
            if args[0].constant is not None:
                return func(*args, **kwargs)
            if args[0].dtype == torch.bool:
                return False
            return 1.0 if args[0].is_floating_point() else 1
        if name == "nonzero" and isinstance(args[0], FakeTensor) and args[0].constant is None:  # at most every element
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        return func(*args, **kwargs)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples of arguments. torch's own search takes several times as long."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | ValuesView):
            yield from tensors_in(value)
