"""Signals that ask a run to stop: what is done is saved, and the script leaves with status 75.

SIGTERM (a scheduler), SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning) and SIGHUP (a closed terminal) are only noted and
answered here; what to do is decided by all ranks together, even where one of them alone was signalled: at the end of a
step, and between the batches of an evaluation.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from kit.strategy.launcher import launcher_is_gone

if TYPE_CHECKING:
    from accelerate import Accelerator

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
# One Ctrl-C reaches a rank twice: from the terminal, and from the launcher that got it too.
SAME_SECONDS = 1.0


class Stopped(Exception):
    """An evaluation was left before its end, by all ranks at the same batch."""


class StopRequest:
    """The first of the signals that this process was sent since this was made, if any."""

    def __init__(self, accelerator: "Accelerator") -> None:
        self._accelerator = accelerator
        self._signal = 0
        self._time = 0.0
        for number in (getattr(signal, name) for name in NAMES if hasattr(signal, name)):
            # `nohup` has a process ignore it; ranks are sent it by a launcher that ends and takes them along.
            is_ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not (is_ignored and accelerator.num_processes == 1):
                signal.signal(number, self._take)

    @property
    def is_made(self) -> bool:
        return bool(self._signal)

    def along(self, progress: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
        """``progress`` that raises ``Stopped`` before its next item, on all ranks, once any of them was asked to stop.

        All ranks must take equally many items.
        """

        def stopping(*args: Any) -> Iterator[Any]:
            for item in progress(*args):
                if self._is_made_anywhere():
                    raise Stopped
                yield item

        return stopping

    def _is_made_anywhere(self) -> bool:
        if self._accelerator.num_processes == 1:
            return self.is_made
        asked = torch.tensor([float(self.is_made)])  # of the CPU: a GPU need not be waited for
        return bool(self._accelerator.reduce(asked, reduction="sum").item())

    def _take(self, number: int, frame: Any) -> None:
        if not self._signal:
            self._signal, self._time = number, time.monotonic()
            if self._accelerator.is_main_process:
                again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
                with suppress(OSError):  # a closed terminal; and no `print`, which may be at work just now
                    os.write(2, f"\n{signal.Signals(number).name}: stopping and saving{again}\n".encode())
            return
        # Whoever asks twice does not want to wait. A scheduler's SIGTERM may repeat, and means no more than once; after
        # a Ctrl-C it may be nothing but the launcher's death of the same one.
        is_urgent = number == signal.SIGINT or (number == signal.SIGTERM and not launcher_is_gone())
        if self._signal == signal.SIGINT and is_urgent and time.monotonic() - self._time > SAME_SECONDS:
            os._exit(130)
