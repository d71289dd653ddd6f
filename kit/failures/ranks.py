"""The status of every rank, to name a rank that died or hangs.

On every rank a thread writes the rank's status to the ranks' key-value store once per second. If no rank makes progress
for the time-out, or if a collective fails, each rank asks which ranks are missing (``kit.failures.survey``), and tells
in which phase and step they were last seen. Progress means: a phase or a collective begins, an evaluation takes an
item, or the process reads or writes files; so a slow disk does not count as a hang.

If the store does not answer either, as when a machine or the network went down, the rank says that, and ends.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import torch

from kit.errors import TrainingError
from kit.failures.survey import SILENT_SECONDS, RankStatus, Some, Surveys
from kit.phases import STARTING, Phase
from kit.strategy.launcher import end_launcher_later, remember_end
from kit.strategy.rendezvous import BoundedStore

if TYPE_CHECKING:
    from accelerate import Accelerator

BEAT_SECONDS = 1.0
MOVED_BYTES = 1 << 16  # reading or writing more than this within a beat counts as progress


class Watch:
    """Writes the status of this rank, and reads those of the others when something fails."""

    def __init__(
        self,
        accelerator: "Accelerator",
        store: BoundedStore | None,
        timeout_seconds: float,
        trains: bool = True,
        tell: Callable[[str], int] | None = None,
    ) -> None:
        """
        Args:
            store: a connection to the ranks' key-value store that nothing else uses; None with a single rank.
            timeout_seconds: without progress on any rank for so long, the process ends with an error message.
            trains: whether the same command continues from a checkpoint.
            tell: called with the message before the process ends; returns the exit status. None: print it, status 1.
        """
        self._tell = tell or self._print
        self._rank, self._world = accelerator.process_index, accelerator.num_processes
        self._store, self._timeout = store, timeout_seconds
        # Without a launcher's store, rank 0 keeps one.
        self._surveys = Surveys(store, self._world, timeout_seconds, self._rank == 0) if store is not None else None
        self._step, self._phase, self._save, self._moved = 0, STARTING.doing, "", time.monotonic()
        self._is_asking, self._trains = False, trains
        if store is not None:
            threading.Thread(target=self._beat, daemon=True).start()

    def at(self, phase: Phase, step: int = 0) -> None:
        """Note that this rank begins ``phase``; ``step`` counts from 1, and is 0 for a phase outside the steps."""
        self._step, self._phase, self._moved = step, phase.doing, time.monotonic()

    def at_save(self, work: str) -> None:
        """Note what this rank begins to do for a checkpoint in the background; an empty text when it is done."""
        self._save, self._moved = work, time.monotonic()

    def along(self, progress: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
        """Wrap ``progress`` so that each item counts as progress of this rank.

        An evaluation may take longer than the time-out.
        """

        def moving(*args: Any) -> Iterator[Any]:
            for item in progress(*args):
                self._moved = time.monotonic()
                yield item

        return moving

    def explain(self, error: BaseException) -> TrainingError | None:
        """Return an error that names the ranks that are gone; None if all ranks are alive.

        Args:
            error: an exception raised by a collective.
        """
        if self._surveys is None or not isinstance(error, RuntimeError):
            return None
        then = "the same command continues from the last checkpoint" if self._trains else ""
        try:
            gone = self._surveys.ask().gone
        except TimeoutError:
            return TrainingError(self._unreachable() + (then and f"\n    -> {then}"))
        if not gone.count:
            return None
        are, was, it = ("are", "were", "They say") if gone.count > 1 else ("is", "was", "It says")
        then = then and f";\n       {then}"
        return TrainingError(
            f"{gone.names()} {are} gone, last seen: {_listed(gone)}\n"
            f"    -> {it} why above, or {was} killed: "
            f"by hand, by a scheduler, or for lack of memory (see `dmesg`){then}"
        )

    def _beat(self) -> None:
        beats = last = moved_bytes = 0
        before = time.monotonic()
        while True:
            collectives, now, num_bytes = _collectives_begun(), time.monotonic(), _bytes_of_files()
            if collectives != last or num_bytes - moved_bytes > MOVED_BYTES:
                self._moved = now
            last, moved_bytes = collectives, num_bytes
            if now - before > BEAT_SECONDS + SILENT_SECONDS:  # this process was paused, as by a scheduler's SIGSTOP
                self._moved += now - before
            beats += 1
            status = RankStatus(
                self._rank,
                beats,
                self._step,
                self._phase,
                self._save,
                collectives,
                now - self._moved,
                socket.gethostname(),
                os.getpid(),
            )
            self._write(status)
            before = time.monotonic()
            if now - self._moved > self._timeout and not self._is_asking:
                self._is_asking = True
                # In another thread, because this one must continue to write the status.
                threading.Thread(target=self._ask_others, args=(self._moved,), daemon=True).start()
            time.sleep(BEAT_SECONDS)

    def _write(self, status: RankStatus) -> None:
        assert self._surveys is not None
        # The process that keeps the store has ended, or cannot be reached; the next reader reports that.
        with suppress(RuntimeError, TimeoutError):
            self._surveys.write(status)

    def _ask_others(self, moved: float) -> None:
        """End the process if no other rank makes progress either.

        ``os._exit``, because an exception cannot interrupt a collective that never returns.
        """
        waited = f"{self._timeout} s without a move (--ddp_timeout), {self._phase}"
        waited += f" in step {self._step}" if self._step else ""
        assert self._surveys is not None
        try:
            found = self._surveys.ask()
        except TimeoutError:
            self._leave(f"{waited}; {self._unreachable()}")
            return
        if self._moved != moved or found.moves:
            self._is_asking = False
            return
        if found.absent.count < self._world:
            reason = f"{found.absent.names()} did not arrive, last seen: {_listed(found.absent)}"
        else:
            reason = f"every rank waits: a GPU, the network or a disk hangs ({_listed(found.absent)})"
        self._leave(f"{waited}; {reason}", found.gone.first)

    def _leave(self, message: str, gone: Iterable[RankStatus] = ()) -> None:
        exit_status = self._tell(message)
        here = [status.pid for status in gone if status.host == socket.gethostname() and status.pid]
        remember_end(exit_status, is_final=False, killed=here)
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
        with suppress(OSError):  # standard error is closed
            print(f"\nerror: rank {self._rank}: {message}", file=sys.stderr, flush=True)
        return 1


def _listed(ranks: Some) -> str:
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


def _collectives_begun() -> int:
    """How many collectives this rank has begun; 0 if the backend does not count them or the group is closed."""
    try:
        return torch.distributed.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    except (RuntimeError, AttributeError):
        return 0
