"""Signals that ask a run to stop: the step is finished, saved, and the script leaves with status 75.

SIGTERM (a scheduler), SIGINT (Ctrl-C) and SIGUSR1 (Slurm's warning) are only noted here; what to do is decided by all
ranks together at the end of a step, even where one of them alone was signalled.
"""

import os
import signal
import time
from typing import Any

STATUS = 75  # EX_TEMPFAIL: run the same command again
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))
# One Ctrl-C reaches a rank twice: from the terminal, and from the launcher that got it too.
SAME_SECONDS = 1.0


class StopRequest:
    """The first of ``SIGNALS`` this process was sent since this was made, if any."""

    def __init__(self) -> None:
        self._signal = 0
        self._time = 0.0
        for number in SIGNALS:
            signal.signal(number, self._take)

    @property
    def is_made(self) -> bool:
        return bool(self._signal)

    def _take(self, number: int, frame: Any) -> None:
        if not self._signal:
            self._signal, self._time = number, time.monotonic()
            return
        # Whoever asks twice does not want to wait. A scheduler's SIGTERM may repeat, and means no more than once.
        is_urgent = self._signal == signal.SIGINT and number in (signal.SIGINT, signal.SIGTERM)
        if is_urgent and time.monotonic() - self._time > SAME_SECONDS:
            os._exit(130)
