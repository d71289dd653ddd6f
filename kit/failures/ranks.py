"""The status of every rank, to name a rank that died or hangs.

On every rank a thread writes the rank's status to the ranks' key-value store once per second. If no rank makes progress
for the time-out, or if a collective fails, a rank reads all statuses and reports which ranks are missing, and in which
phase and step they were last seen. Progress means: a phase or a collective begins, an evaluation takes an item, or the
process reads or writes files; so a slow disk does not count as a hang.

If the store does not answer either, as when a machine or the network went down, the rank says that, and ends.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from kit.errors import TrainingError
from kit.failures.phases import STARTING, Phase
from kit.strategy.launcher import end_launcher_later, remember_end
from kit.strategy.rendezvous import BoundedStore

if TYPE_CHECKING:
    from accelerate import Accelerator

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0  # a rank without a beat for so long is dead, stopped, or has lost its network
MOVED_BYTES = 1 << 16  # reading or writing more than this within a beat counts as progress


@dataclass(frozen=True)
class RankStatus:
    """How far a rank has come; each rank writes its own status with every beat."""

    rank: int
    beats: int = 0  # statuses written so far
    step: int = 0  # from 1; 0 outside the steps
    phase: str = STARTING.doing
    save: str = ""  # what it does for a checkpoint in the background; empty for nothing
    collectives: int = 0  # collectives begun so far, counted by torch
    still_seconds: float = 0.0  # since its last progress
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        host = f" on {self.host}" if self.host not in ("", socket.gethostname()) else ""
        text = f"rank {self.rank}{host} {self.phase}" + (f" in step {self.step}" if self.step else "")
        return text + (f", {self.save}" if self.save else "")


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
        if self._store is None or not isinstance(error, RuntimeError):
            return None
        then = "the same command continues from the last checkpoint" if self._trains else ""
        try:
            gone, _ = self._survey()
        except TimeoutError:
            return TrainingError(self._unreachable() + (then and f"\n    -> {then}"))
        if not gone:
            return None
        are, it = ("are", "They say") if len(gone) > 1 else ("is", "It says")
        then = then and f";\n       {then}"
        return TrainingError(
            f"{_names(gone)} {are} gone, last seen: {_listed(gone)}\n"
            f"    -> {it} why above, or was killed: by hand, by a scheduler, or for lack of memory (see `dmesg`){then}"
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
        text = json.dumps(asdict(status))
        # The process that keeps the store has ended, or cannot be reached; the next reader reports that.
        with suppress(RuntimeError, TimeoutError):
            assert self._store is not None
            self._store.call(lambda store: store.set(str(self._rank), text))

    def _ask_others(self, moved: float) -> None:
        """End the process if no other rank makes progress either.

        ``os._exit``, because an exception cannot interrupt a collective that never returns.
        """
        waited = f"{self._timeout} s without a move (--ddp_timeout), {self._phase}"
        waited += f" in step {self._step}" if self._step else ""
        try:
            gone, statuses = self._survey()
        except TimeoutError:
            self._leave(f"{waited}; {self._unreachable()}")
            return
        others = [status for status in statuses if status not in gone and status.rank != self._rank]
        # Half the time-out, because the ranks did not all begin to wait at the same time.
        if self._moved != moved or any(status.still_seconds < self._timeout / 2 for status in others):
            self._is_asking = False
            return
        furthest = max(status.collectives for status in statuses)
        absent = gone or [status for status in statuses if status.collectives < furthest]
        absent = absent or [status for status in statuses if status.save]
        if 0 < len(absent) < self._world:
            reason = f"{_names(absent)} did not arrive, last seen: {_listed(absent)}"
        else:
            reason = f"every rank waits: a GPU, the network or a disk hangs ({_listed(statuses)})"
        self._leave(f"{waited}; {reason}", gone)

    def _leave(self, message: str, gone: Iterable[RankStatus] = ()) -> None:
        exit_status = self._tell(message)
        for status in gone:  # a stopped process does not react to the launcher's SIGTERM
            if status.host == socket.gethostname() and status.pid:
                with suppress(OSError):
                    os.kill(status.pid, signal.SIGKILL)
        remember_end(exit_status, is_final=False)
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

    def _survey(self) -> tuple[list[RankStatus], list[RankStatus]]:
        """Return the statuses of the silent ranks, and those of all ranks.

        A rank is silent if its beats do not increase; so the clocks of several machines need not agree.

        Raises:
            TimeoutError: the store does not answer.
        """
        before = self._statuses()
        time.sleep(SILENT_SECONDS)
        statuses = self._statuses()
        if not statuses:  # the store is gone; the launcher keeps it, or else rank 0
            statuses = before or [RankStatus(rank) for rank in range(self._world)]
            return statuses[:1], statuses
        silent = [status for status in statuses if before and status.beats == before[status.rank].beats]
        return silent, statuses

    def _statuses(self) -> list[RankStatus]:
        """The last status of each rank; of a rank that never wrote one, the status at the start.

        Empty if the store is gone.

        Raises:
            TimeoutError: the store does not answer.
        """

        def read(store: Any) -> list[dict[str, Any]]:
            keys = [str(rank) for rank in range(self._world)]
            present = [store.check([key]) for key in keys]
            return [
                json.loads(store.get(key)) if here else {"rank": int(key)}
                for key, here in zip(keys, present, strict=True)
            ]

        assert self._store is not None
        try:
            records = self._store.call(read)
        except RuntimeError:
            return []
        return [RankStatus(**record) for record in records]


def _names(statuses: list[RankStatus]) -> str:
    return f"rank{'s' if len(statuses) > 1 else ''} {', '.join(str(status.rank) for status in statuses)}"


def _listed(statuses: list[RankStatus]) -> str:
    return "; ".join(map(str, statuses))


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
