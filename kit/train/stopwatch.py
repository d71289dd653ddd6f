"""How long this rank computes in a step before it waits for gradients of other ranks.

Promises: nothing waits for the device. On a GPU two events are recorded in its stream, and read after the step's own
synchronisation.
"""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Stopwatch:
    """Measures from the model's next forward pass to the first ``stop``, in the order of the device's work."""

    def __init__(self, model: "torch.nn.Module", device: "torch.device") -> None:
        self._event: Any = None
        if device.type != "cpu":
            import torch

            self._event = torch.get_device_module(device).Event
        self._begin: Any = None
        self._end: Any = None
        # Within the wrapper: DDP first sends the buffers of rank 0 to all, which waits for other ranks.
        self._hook = getattr(model, "module", model).register_forward_pre_hook(self._start)

    def _start(self, *_: Any) -> None:
        self._hook.remove()
        self._begin = self._now()

    def stop(self) -> None:
        """Stop. Only the first call counts."""
        self._end = self._end or self._now()

    @property
    def seconds(self) -> float:
        """The time measured. On a GPU the host must have waited since for work that began after ``stop``."""
        if self._event is None:
            return float(self._end - self._begin)
        return float(self._begin.elapsed_time(self._end)) / 1000  # of milliseconds

    def _now(self) -> Any:
        if self._event is None:
            return time.perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event
