"""Signals that ask a run to stop: the run saves a checkpoint and ends with exit status 75.

The signals are SIGTERM (from a scheduler), SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning) and SIGHUP (a closed terminal).
The handler only notes a signal and prints a line. All ranks then decide together whether to stop, even if only one of
them got the signal: at the end of each step, and between the batches of an evaluation.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kit.failures import exits
from kit.strategy.processes.launcher import launcher_has_ended
from kit.system import interrupt
from kit.system.errors import LateError

if TYPE_CHECKING:
    from accelerate import Accelerator

# One Ctrl-C may reach a rank twice: from the terminal, and from the launcher, which passes it on. A second one within
# this time counts as the same.
SAME_SECONDS = 1.0


class StopRequest:
    """Whether this process got one of the signals.

    Attributes:
        is_agreed: whether all ranks know that the run stops.
    """

    is_agreed = False

    def __init__(self, accelerator: "Accelerator") -> None:
        """Install the signal handlers. Every rank creates one, in its main thread."""
        self._accelerator = accelerator
        self._signal = 0
        self._error: LateError | None = None
        self._time = 0.0
        for number in interrupt.SIGNALS:
            # `nohup` makes a process ignore SIGHUP, and a single process keeps ignoring it. Ranks must handle it: a
            # launcher that ends sends it to them.
            is_ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not (is_ignored and accelerator.num_processes == 1):
                signal.signal(number, self._handle)

    @property
    def is_made(self) -> bool:
        """Whether this process got a signal to stop."""
        return bool(self._signal)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """In the ``with`` block, an exception that ends an evaluation or rollout on all ranks is an agreed stop."""
        try:
            yield
        except (interrupt.Stopped, LateError) as cause:
            self._error = cause if isinstance(cause, LateError) else None
            self.is_agreed = True

    @property
    def reason(self) -> str:
        """What stopped the run, for a message."""
        return "an error" if self._error else "a signal"

    def leave(self) -> NoReturn:
        """End the process, after the run has saved: with status 75, or with the error."""
        if self._error:
            raise self._error
        exits.leave(exits.STOPPED)

    def interruptible(self, progress: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
        """Wrap ``progress`` so that it raises ``interrupt.Stopped`` once any rank got a signal to stop.

        It does so on all ranks before the same item. All ranks must take the same number of items.
        """

        def stopping(*args: Any) -> Iterator[Any]:
            for item in progress(*args):
                if self._is_made_anywhere():
                    raise interrupt.Stopped
                yield item

        return stopping

    def _is_made_anywhere(self) -> bool:
        if self._accelerator.num_processes == 1:
            return self.is_made
        asked = torch.tensor([float(self.is_made)])  # on the CPU, so that nothing waits for the GPU
        return bool(self._accelerator.reduce(asked, reduction="sum").item())

    def _handle(self, number: int, frame: Any) -> None:
        if not self._signal:
            self._signal = number
            self._time = time.monotonic()
            if self._accelerator.is_main_process:
                again = "; Ctrl-C again ends at once, and loses the steps since the last save"
                again = again if number == signal.SIGINT else ""
                with suppress(OSError):  # the terminal is closed. Not `print`: the signal may have interrupted one
                    os.write(2, f"\n{signal.Signals(number).name}: stopping and saving{again}\n".encode())
            return
        # After a Ctrl-C, another one or a SIGTERM ends the process at once. An exception is the SIGTERM that a process
        # gets when its launcher ends, because the same Ctrl-C ended the launcher. After any other signal, further ones
        # change nothing: schedulers repeat their SIGTERM.
        is_urgent = number == signal.SIGINT or (number == signal.SIGTERM and not launcher_has_ended())
        if self._signal == signal.SIGINT and is_urgent and time.monotonic() - self._time > SAME_SECONDS:
            os._exit(interrupt.STATUS)
