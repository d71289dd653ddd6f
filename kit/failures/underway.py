"""Says that a long step is under way, and what it waits for, so that a slow network does not look like a hang.

Promises: the first step of a start is reported when it takes ``FIRST_SECONDS``, a later one when it also takes
``TIMES`` as long as any before it; then each time that its duration has doubled. The step itself is not touched.
"""

import threading
import time
from typing import NamedTuple

from kit.console import say
from kit.phases import READING, TRAINING, Phase
from kit.strategy.waiting import waited_seconds

FIRST_SECONDS = 10.0
TIMES = 3.0  # a step is unusual if it takes this many times as long as the longest before it


class _Current(NamedTuple):
    """The step that is under way."""

    number: int  # from 1
    began: float  # monotonic
    waited: float | None  # ``waited_seconds`` at its beginning


class Underway:
    """Watches the steps of this rank, which creates it in the thread that trains."""

    def __init__(self, on_cpu: bool) -> None:
        """
        Args:
            on_cpu: the thread itself computes. On a GPU it always waits, so nothing is said about waiting.
        """
        self._thread = threading.get_native_id() if on_cpu else None
        self._current: _Current | None = None  # replaced as a whole, because another thread reads it
        self._seen: _Current | None = None
        self._longest = 0.0
        self._limit = FIRST_SECONDS

    def start(self) -> None:
        """Begin to report, in a thread of its own, until the process ends."""
        threading.Thread(target=self._report, name="steps under way", daemon=True).start()

    def enter(self, phase: Phase, step: int) -> None:
        """Note that ``phase`` of ``step`` begins."""
        current = self._current
        if phase == TRAINING and current is not None and current.number == step:
            return  # the same step, whose data has been read
        now = time.monotonic()
        if current is not None:
            self._longest = max(self._longest, now - current.began)
        is_step = phase in (READING, TRAINING)
        self._current = _Current(step, now, self._waited()) if is_step else None

    def due(self) -> str:
        """Return the line that is due now; empty if none is."""
        current = self._current
        if current is None:
            return ""
        passed = time.monotonic() - current.began
        if current is not self._seen:
            self._seen = current
            self._limit = max(FIRST_SECONDS, TIMES * self._longest)
        if passed < self._limit:
            return ""
        self._limit = 2 * passed
        text = f"step {current.number} is under way: {passed:.0f} s"
        waited = self._waited()
        if waited is None or current.waited is None:
            return text
        return f"{text}, {waited - current.waited:.0f} s of it in wait for data from other ranks"

    def _waited(self) -> float | None:
        return None if self._thread is None else waited_seconds(self._thread)

    def _report(self) -> None:
        while True:
            time.sleep(1.0)
            if line := self.due():
                say(line)
