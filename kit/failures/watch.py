"""Heartbeats of every rank, to name a rank that exited or hangs.

On every rank a thread writes the rank's status to the ranks' key-value store once per second. If no rank makes progress
for the time-out, or if a collective fails, the rank takes a survey (``kit.failures.survey``), and reports which ranks
are missing, and in which phase and step they were last seen. Progress means: a phase or a collective starts, an
evaluation takes an item, or the process reads or writes files; so a slow disk does not count as a hang.

If the store does not answer, because a machine or the network went down, the rank reports that, and ends.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import psutil

from kit.failures.survey import SILENT_SECONDS, RankStatus, Survey, last_seen, names, take_survey
from kit.strategy.processes.rendezvous import collectives_begun
from kit.strategy.processes.tcp_store import BoundedStore
from kit.system.console import begin_work, progress, show_error
from kit.system.errors import TrainingError
from kit.system.phases import STARTING, Phase

if TYPE_CHECKING:
    from accelerate import Accelerator

HEARTBEAT_SECONDS = 1.0
PROGRESS_BYTES = 1 << 16  # reading or writing more than this within a heartbeat counts as progress


class Watch:
    """Writes the status of this rank, and reads those of the others when something fails."""

    def __init__(
        self,
        accelerator: "Accelerator",
        store: BoundedStore | None,
        timeout_seconds: float,
        trains: bool = True,
        report: Callable[[str], int] | None = None,
    ) -> None:
        """
        Args:
            store: a connection to the ranks' key-value store that nothing else uses; None with a single rank.
            timeout_seconds: if no rank makes progress for this time, the process ends with an error message.
            trains: whether the same command resumes from a checkpoint.
            report: called with the message before the process ends; returns the exit status. None: print it, status 1.
        """
        self._report = report or self._print
        self._rank = accelerator.process_index
        self._world = accelerator.num_processes
        self._store = store
        self._timeout = timeout_seconds
        self._trains = trains
        self._step = 0
        self.phase = STARTING
        self._save = ""
        self._last_progress = time.monotonic()
        self._is_surveying = False
        if store is not None:
            threading.Thread(target=self._send_heartbeats, args=(store,), daemon=True).start()

    def enter(self, phase: Phase, step: int = 0) -> None:
        """Note that this rank begins ``phase``; ``step`` counts from 1, and is 0 for a phase outside the steps."""
        self._step = step
        self.phase = phase
        begin_work(phase.doing, f" in step {step}" if step else "")
        self._last_progress = time.monotonic()

    def enter_save(self, work: str) -> None:
        """Note the work of this rank on an asynchronous checkpoint; an empty string when it is done."""
        self._save = work
        self._last_progress = time.monotonic()

    def progress(self, items: Iterable[Any], name: str, total: int | None) -> Iterator[Any]:
        """Return ``items`` with a progress bar. Each item taken counts as a sign that this rank does not hang.

        An evaluation may take longer than the time-out.
        """
        for item in progress(items, name, total):
            self._last_progress = time.monotonic()
            yield item

    def explain(self, error: BaseException) -> TrainingError | None:
        """Return an error that names the ranks that exited; None if all ranks are alive.

        Args:
            error: an exception raised by a collective.
        """
        if self._store is None or not isinstance(error, RuntimeError):
            return None
        then = "\n    -> the same command resumes from the last checkpoint" if self._trains else ""
        try:
            exited = take_survey(self._store, self._world, self._timeout).silent
        except (TimeoutError, RuntimeError):
            return TrainingError(self._unreachable() + then)
        if not exited:
            return None
        found = f"{names(exited)} exited, last seen: {self._last_seen(exited)}"
        causes = "by hand, by a scheduler, or for lack of memory (see `dmesg`)"
        return TrainingError(f"{found}; a rank that printed no reason was killed: {causes}{then}")

    def _send_heartbeats(self, store: BoundedStore) -> None:
        heartbeats = 0
        last_collectives = 0
        last_bytes = 0
        before = time.monotonic()
        while True:
            collectives = collectives_begun() or 0
            now = time.monotonic()
            num_bytes = _bytes_of_files()
            if collectives != last_collectives or num_bytes - last_bytes > PROGRESS_BYTES:
                self._last_progress = now
            last_collectives = collectives
            last_bytes = num_bytes
            if now - before > HEARTBEAT_SECONDS + SILENT_SECONDS:  # paused, for example by a scheduler's SIGSTOP
                self._last_progress += now - before
            heartbeats += 1
            status = RankStatus(
                rank=self._rank,
                heartbeats=heartbeats,
                step=self._step,
                phase=self.phase.doing,
                save=self._save,
                collectives=collectives,
                idle_seconds=now - self._last_progress,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            _write(store, status)
            before = time.monotonic()
            if now - self._last_progress > self._timeout and not self._is_surveying:
                self._is_surveying = True
                # In another thread, because this one must continue to write the status.
                threading.Thread(target=self._ask_others, args=(store, self._last_progress), daemon=True).start()
            time.sleep(HEARTBEAT_SECONDS)

    def _ask_others(self, store: BoundedStore, last_progress: float) -> None:
        """End the process if no other rank makes progress either.

        ``os._exit``, because an exception cannot interrupt a collective that never returns.
        """
        waited = f"{self._timeout} s without progress (--ddp_timeout), {self.phase.doing}"
        waited += f" in step {self._step}" if self._step else ""
        try:
            found = take_survey(store, self._world, self._timeout)
        except (TimeoutError, RuntimeError):
            self._leave(f"{waited}; {self._unreachable()}")
            return
        if self._last_progress != last_progress or found.is_progressing:
            self._is_surveying = False
            return
        self._leave(f"{waited}; {self._who_is_missing(found)}", found.silent)

    def _who_is_missing(self, found: Survey) -> str:
        seen = self._last_seen(found.missing)
        if len(found.missing) < self._world:
            return f"{names(found.missing)} never reached the collective, last seen: {seen}"
        return f"every rank waits: a GPU, the network or a disk hangs ({seen})"

    def _leave(self, message: str, silent: Iterable[RankStatus] = ()) -> None:
        status = max(1, self._report(message))
        for pid in [each.pid for each in silent if each.host == socket.gethostname() and each.pid]:
            with suppress(OSError):  # a stopped process does not react to the launcher's SIGTERM
                os.kill(pid, signal.SIGKILL)
        os._exit(status)

    def _unreachable(self) -> str:
        """A message for a store that does not answer."""
        assert self._store is not None
        where = f"the rendezvous store at {self._store.address} does not answer {socket.gethostname()}"
        return f"{where}: the launcher or the machine of rank 0 went down, or the network"

    def _last_seen(self, ranks: list[RankStatus]) -> str:
        return last_seen(ranks, socket.gethostname())

    def _print(self, message: str) -> int:
        show_error(f"\nerror: rank {self._rank}: {message}")
        return 1


def _write(store: BoundedStore, status: RankStatus) -> None:
    with suppress(RuntimeError, TimeoutError):  # the next reader reports that
        store.call(lambda each: each.set(str(status.rank), json.dumps(asdict(status))))


def _bytes_of_files() -> int:
    """Bytes read and written by this process so far; 0 if the operating system does not count them."""
    with suppress(AttributeError, OSError, psutil.Error):
        counters = psutil.Process().io_counters()
        return counters.read_bytes + counters.write_bytes + counters.read_chars + counters.write_chars
    return 0
