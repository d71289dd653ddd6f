"""The status of every rank, to name a rank that died or hangs.

On every rank a thread writes the rank's status to the ranks' key-value store once per second. If no rank makes progress
for the time-out, or if a collective fails, each rank asks which ranks are missing (``kit.failures.survey``), and
reports in which phase and step they were last seen. Progress means: a phase or a collective begins, an evaluation takes
an item, or the process reads or writes files; so a slow disk does not count as a hang.

A rank that fails for a reason of its own leaves a note (``kit.strategy.failure_note``). The thread looks for it with
every beat, and ends its rank with that reason, whatever the rank waits for.

If the store does not answer either, as when a machine or the network went down, the rank says that, and ends.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil

from kit.console import show_error
from kit.errors import TrainingError
from kit.failures import exits
from kit.failures.survey import SILENT_SECONDS, RankList, RankStatus, Surveys
from kit.phases import STARTING, Phase
from kit.strategy.failure_note import FailedElsewhere, FailureNote, find_note, rank_notes_are_used, report_to_others
from kit.strategy.launcher import end_launcher_later, launched_rank, record_exit
from kit.strategy.rendezvous import collectives_begun
from kit.strategy.store import BoundedStore

if TYPE_CHECKING:
    from accelerate import Accelerator

BEAT_SECONDS = 1.0
_OWN_SECONDS = 3.0  # in which a rank that was about to fail too reports its own error
PROGRESS_BYTES = 1 << 16  # reading or writing more than this within a beat counts as progress


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
            trains: whether the same command continues from a checkpoint.
            report: called with the message before the process ends; returns the exit status. None: print it, status 1.
        """
        self._report = report or self._print
        self._rank = accelerator.process_index
        self._world = accelerator.num_processes
        self._store = store
        self._timeout = timeout_seconds
        self._trains = trains
        # Without a launcher's store, rank 0 keeps one.
        self._surveys = Surveys(store, self._world, timeout_seconds, self._rank == 0) if store is not None else None
        self._step = 0
        self._phase = STARTING.doing
        self._save = ""
        self._last_progress = time.monotonic()
        self._is_surveying = False
        self._note: FailureNote | None = None
        if store is not None:
            threading.Thread(target=self._beat, daemon=True).start()

    def enter(self, phase: Phase, step: int = 0) -> None:
        """Note that this rank begins ``phase``; ``step`` counts from 1, and is 0 for a phase outside the steps."""
        self._step = step
        self._phase = phase.doing
        self._last_progress = time.monotonic()

    def enter_save(self, work: str) -> None:
        """Note what this rank begins to do for a checkpoint in the background; an empty string when it is done."""
        self._save = work
        self._last_progress = time.monotonic()

    def noting_progress(self, progress: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
        """Wrap ``progress`` so that each item counts as progress of this rank.

        An evaluation may take longer than the time-out.
        """

        def noting(*args: Any) -> Iterator[Any]:
            for item in progress(*args):
                self._last_progress = time.monotonic()
                yield item

        return noting

    def explain(self, error: BaseException) -> TrainingError | None:
        """Return an error that names the ranks that are gone; None if all ranks are alive.

        Args:
            error: an exception raised by a collective.
        """
        if self._surveys is None or not isinstance(error, RuntimeError):
            return None
        if note := self._note or self._find_note():
            return FailedElsewhere(note)
        then = "the same command continues from the last checkpoint" if self._trains else ""
        try:
            gone = self._surveys.ask().gone
        except TimeoutError:
            ending = f"\n    -> {then}" if then else ""
            return TrainingError(self._unreachable() + ending)
        if not gone.count:
            return None
        several = gone.count > 1
        found = f"{gone.names()} {'are' if several else 'is'} gone, last seen: {_listed(gone)}"
        said, killed = ("They say", "were killed") if several else ("It says", "was killed")
        causes = "by hand, by a scheduler, or for lack of memory (see `dmesg`)"
        ending = f";\n       {then}" if then else ""
        return TrainingError(f"{found}\n    -> {said} why above, or {killed}: {causes}{ending}")

    def _beat(self) -> None:
        beats = 0
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
            if now - before > BEAT_SECONDS + SILENT_SECONDS:  # this process was paused, as by a scheduler's SIGSTOP
                self._last_progress += now - before
            beats += 1
            status = RankStatus(
                rank=self._rank,
                beats=beats,
                step=self._step,
                phase=self._phase,
                save=self._save,
                collectives=collectives,
                idle_seconds=now - self._last_progress,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            self._write(status)
            before = time.monotonic()
            if self._note is None and (note := self._find_note()):
                self._note = note
                threading.Thread(target=self._end_as, args=(note,), daemon=True).start()
            if now - self._last_progress > self._timeout and not self._is_surveying:
                self._is_surveying = True
                # In another thread, because this one must continue to write the status.
                threading.Thread(target=self._ask_others, args=(self._last_progress,), daemon=True).start()
            time.sleep(BEAT_SECONDS)

    def _write(self, status: RankStatus) -> None:
        assert self._surveys is not None
        # The process that keeps the store has ended, or cannot be reached; the next reader reports that.
        with suppress(RuntimeError, TimeoutError):
            self._surveys.write(status)

    def _find_note(self) -> FailureNote | None:
        assert self._store is not None
        if rank_notes_are_used():
            with suppress(RuntimeError, TimeoutError):
                return self._store.call(lambda store: find_note(store.underlying_store))
        return None

    def _end_as(self, note: FailureNote) -> None:
        """End this rank as the one that left the note, unless it ends by itself."""
        rank = launched_rank()
        leads = rank is None or rank.local_rank == 0  # it prints, and a launcher ends the others then
        time.sleep(_OWN_SECONDS if leads else 2 * _OWN_SECONDS)
        if not exits.is_ending():
            self._leave(str(FailedElsewhere(note)), status=note.status, tells=False)

    def _ask_others(self, last_progress: float) -> None:
        """End the process if no other rank makes progress either.

        ``os._exit``, because an exception cannot interrupt a collective that never returns.
        """
        waited = f"{self._timeout} s without progress (--ddp_timeout), {self._phase}"
        waited += f" in step {self._step}" if self._step else ""
        assert self._surveys is not None
        try:
            found = self._surveys.ask()
        except TimeoutError:
            self._leave(f"{waited}; {self._unreachable()}", tells=False)
            return
        if self._last_progress != last_progress or found.is_progressing:
            self._is_surveying = False
            return
        if found.absent.count < self._world:
            reason = f"{found.absent.names()} did not arrive, last seen: {_listed(found.absent)}"
        else:
            reason = f"every rank waits: a GPU, the network or a disk hangs ({_listed(found.absent)})"
        self._leave(f"{waited}; {reason}", found.gone.first)

    def _leave(self, message: str, gone: Iterable[RankStatus] = (), status: int = 1, tells: bool = True) -> None:
        exit_status = max(status, self._report(message))
        if tells:
            report_to_others(exit_status, message)
        here = [status.pid for status in gone if status.host == socket.gethostname() and status.pid]
        record_exit(exit_status, is_final=False, killed=here, text=message if tells else "")
        for pid in here:  # a stopped process does not react to the launcher's SIGTERM
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        end_launcher_later()
        os._exit(exit_status)

    def _unreachable(self) -> str:
        """What this rank knows when the store does not answer."""
        assert self._store is not None
        return (
            f"{self._store.address}, where the ranks meet, does not answer {socket.gethostname()}: "
            "that machine is down, or the network between the two"
        )

    def _print(self, message: str) -> int:
        show_error(f"\nerror: rank {self._rank}: {message}")
        return 1


def _listed(ranks: RankList) -> str:
    return "; ".join(map(_described, ranks.first)) + ranks.more


def _described(status: RankStatus) -> str:
    host = f" on {status.host}" if status.host not in ("", socket.gethostname()) else ""
    text = f"rank {status.rank}{host} {status.phase}" + (f" in step {status.step}" if status.step else "")
    return text + (f", {status.save}" if status.save else "")


def _bytes_of_files() -> int:
    """Bytes read and written by this process so far; 0 if the operating system does not count them."""
    with suppress(AttributeError, OSError, psutil.Error):
        counters = psutil.Process().io_counters()
        return counters.read_bytes + counters.write_bytes + counters.read_chars + counters.write_chars
    return 0
