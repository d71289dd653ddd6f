"""Counts the bytes that storages of tensors hold, by type of device and by component.

- A storage counts from when it is first shown until it is freed, at its present size (FSDP2 frees unsharded weights by
  resizing their storage to 0), once for all its views. Allocators round sizes up; this does not.
- A storage belongs to a component. ``hold`` says to which, at any time while the storage lives: at the peak the
  components are summed by what is known at the end. What has no label is ``activations``, or ``logits`` where the last
  dimension is the vocabulary.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

ACTIVATIONS, LOGITS, GRADIENTS, GATHERED = "activations", "logits", "gradients", "unsharded weights"
HOST = "host"


class Storages:
    """The storages that were shown and live."""

    def __init__(self, vocab_size: int = 0) -> None:
        """
        Args:
            vocab_size: tensors whose last dimension has this size are logits.
        """
        self._vocab_size = vocab_size
        self._serials: dict[int, int] = {}  # the serial number of each live storage, by its address
        self._devices: dict[int, str] = {}  # type of device of each storage, by serial number
        self._labels: dict[int, str] = {}
        self._refs: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._is_host = False
        self._now: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Forget all peaks and marks; what is held now is the first peak."""
        self._at_begin = dict(self._sizes)
        self._journal: list[tuple[int, int]] = []  # (serial number, change of size)
        self._peaks = dict(self._now)
        self._peak_ends = dict.fromkeys(self._now, 0)  # changes before the peak
        self._marks: dict[str, int] = {}

    def hold(self, tensors: Iterable[Any], component: str | None = None) -> None:
        """Count the storages of ``tensors`` from now on, as ``component`` if it is given."""
        for tensor in tensors:
            serial = self._add(tensor)
            if serial is not None and component:
                self._labels[serial] = component

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count storages that appear in the ``with`` block as on a device ``HOST``.

        For offloading where one device stands for a GPU and its host.
        """
        self._is_host = True
        try:
            yield
        finally:
            self._is_host = False

    def mark(self, moment: str) -> None:
        """Remember what is held now, as ``moment``; of several such moments the last one counts."""
        self._marks[moment] = len(self._journal)

    def peaks(self) -> dict[str, int]:
        """Return the largest number of bytes held since ``begin``, by type of device."""
        return dict(self._peaks)

    def at_peaks(self) -> dict[str, dict[str, int]]:
        """Return what the peak of each type of device consists of."""
        return {device: self._parts(device, end) for device, end in self._peak_ends.items()}

    def at_marks(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return what each type of device held at each moment of ``mark``."""
        return {
            device: {moment: self._parts(device, end) for moment, end in self._marks.items()} for device in self._now
        }

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

    def _add(self, tensor: Any) -> int | None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(tensor, torch.Tensor):
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._serials:
            return self._serials[address]
        device = device_of(tensor).type
        if device == "meta":
            return None
        if self._is_host:
            device = HOST
        serial = len(self._devices)
        self._serials[address], self._devices[serial] = serial, device
        self._refs[serial] = weakref.ref(storage, partial(self._forget, address, serial))
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
        if self._now[device] > self._peaks.get(device, 0):
            self._peaks[device] = self._now[device]
            self._peak_ends[device] = len(self._journal)

    def _forget(self, address: int, serial: int, reference: Any) -> None:
        self._serials.pop(address, None)
        self._refs.pop(serial, None)
        self._change(serial, -self._sizes.get(serial, 0))
        self._sizes.pop(serial, None)

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


def device_of(tensor: Any) -> torch.device:
    """Return the device of a tensor. Of a fake one it is an attribute; its ``device`` would be an operation."""
    return getattr(tensor, "fake_device", None) or tensor.device
