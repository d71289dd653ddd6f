"""The status of every rank: so that a rank that died or hangs is named, with the phase and step the others wait in.

Each rank writes its status to the store through which the ranks found each other; a thread does so every second. When
no rank has moved for the time-out, or a collective failed, the statuses of all say who is missing. To move is to begin
a phase or a collective, to take an item in an evaluation, or to read or write: a slow disk is no hang.
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

if TYPE_CHECKING:
    from accelerate import Accelerator

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0  # without a beat: the process is dead, stopped, or cut off
MOVED_BYTES = 1 << 16  # to or from files within a beat


@dataclass(frozen=True)
class RankStatus:
    """How far a rank has come, as it says itself with every beat."""

    rank: int
    beats: int = 0
    step: int = 0
    phase: str = STARTING.doing
    save: str = ""  # what it does for a checkpoint in the background
    collectives: int = 0  # how many it has begun, counted by torch
    still_seconds: float = 0.0  # since it moved
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        where = f"rank {self.rank} {self.phase}" + (f" in step {self.step}" if self.step else "")
        return where + (f", {self.save}" if self.save else "")


class Watch:
    """The statuses of all ranks; one rank alone needs none and keeps only its own."""

    def __init__(self, accelerator: "Accelerator", store: Any, timeout_seconds: float, trains: bool = True) -> None:
        """
        Args:
            store: a connection of its own to the ranks' key-value store; None where there is one rank.
            trains: the same command goes on from a checkpoint.
        """
        self._rank, self._world = accelerator.process_index, accelerator.num_processes
        self._store, self._timeout = store, timeout_seconds
        self._step, self._phase, self._save, self._moved = 0, STARTING.doing, "", time.monotonic()
        self._asks, self._trains = False, trains
        if store is not None:
            threading.Thread(target=self._beat, daemon=True).start()

    def at(self, phase: Phase, step: int = 0) -> None:
        """This rank begins ``phase`` of 1-based ``step``."""
        self._step, self._phase, self._moved = step, phase.doing, time.monotonic()

    def at_save(self, what: str) -> None:
        """What this rank begins to do for a checkpoint, besides its phase."""
        self._save, self._moved = what, time.monotonic()

    def along(self, progress: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
        """``progress`` whose every item counts as a move: an evaluation may take longer than the time-out."""

        def moving(*args: Any) -> Iterator[Any]:
            for item in progress(*args):
                self._moved = time.monotonic()
                yield item

        return moving

    def explain(self, error: BaseException) -> TrainingError | None:
        """What ``error`` of a collective means, if some rank is gone; None if all are there."""
        if self._store is None or not isinstance(error, RuntimeError):
            return None
        gone, _ = self._survey()
        if not gone:
            return None
        are, it = ("are", "They say") if len(gone) > 1 else ("is", "It says")
        then = ";\n       the same command continues from the last checkpoint" if self._trains else ""
        return TrainingError(
            f"{_names(gone)} {are} gone, last seen: {_told(gone)}\n"
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
            if now - before > BEAT_SECONDS + SILENT_SECONDS:  # stopped, as a scheduler does it, and continued
                self._moved += now - before
            before, beats = now, beats + 1
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
            with suppress(RuntimeError):  # the store went with its process: whoever asks it next will say so
                self._store.set(str(self._rank), json.dumps(asdict(status)))
            if now - self._moved > self._timeout and not self._asks:
                self._asks = True
                # In a thread of its own, for this rank is not silent.
                threading.Thread(target=self._ask_others, args=(self._moved,), daemon=True).start()
            time.sleep(BEAT_SECONDS)

    def _ask_others(self, moved: float) -> None:
        """End the process if no other rank moves either: what never ends cannot be left by an exception."""
        waited = f"{self._timeout} s without a move (--ddp_timeout), {self._phase}"
        waited += f" in step {self._step}" if self._step else ""
        gone, statuses = self._survey()
        others = [status for status in statuses if status not in gone and status.rank != self._rank]
        # Half a time-out, for they did not all begin to wait at the same time.
        if self._moved != moved or any(status.still_seconds < self._timeout / 2 for status in others):
            self._asks = False
            return
        furthest = max(status.collectives for status in statuses)
        absent = gone or [status for status in statuses if status.collectives < furthest]
        absent = absent or [status for status in statuses if status.save]
        if 0 < len(absent) < self._world:
            said = f"{_names(absent)} did not arrive, last seen: {_told(absent)}"
        else:
            said = f"every rank waits: a GPU, the network or a disk hangs ({_told(statuses)})"
        with suppress(OSError):  # nobody reads it
            print(f"\nerror: rank {self._rank}: {waited}; {said}", file=sys.stderr, flush=True)
        for status in gone:  # a stopped process does not hear the launcher's SIGTERM
            if status.host == socket.gethostname() and status.pid:
                with suppress(OSError):
                    os.kill(status.pid, signal.SIGKILL)
        os._exit(1)

    def _survey(self) -> tuple[list[RankStatus], list[RankStatus]]:
        """The ranks that give no sign of life, and all. Clocks of several machines are not compared."""
        before = self._statuses()
        time.sleep(SILENT_SECONDS)
        statuses = self._statuses()
        if not statuses:  # the store is kept by the launcher, or else by rank 0
            statuses = before or [RankStatus(rank) for rank in range(self._world)]
            return statuses[:1], statuses
        silent = [status for status in statuses if before and status.beats == before[status.rank].beats]
        return silent, statuses

    def _statuses(self) -> list[RankStatus]:
        """Empty without the store; a rank that never told its status is at the start, for ever."""
        try:
            known = [self._store.check([str(rank)]) for rank in range(self._world)]
            told = [
                json.loads(self._store.get(str(rank))) if known[rank] else {"rank": rank} for rank in range(self._world)
            ]
        except RuntimeError:
            return []
        return [RankStatus(**status) for status in told]


def _names(statuses: list[RankStatus]) -> str:
    return f"rank{'s' if len(statuses) > 1 else ''} {', '.join(str(status.rank) for status in statuses)}"


def _told(statuses: list[RankStatus]) -> str:
    return "; ".join(map(str, statuses))


def _bytes_of_files() -> int:
    """Read and written by this process so far; 0 where the system does not tell."""
    with suppress(AttributeError, OSError, psutil.Error):
        counters = psutil.Process().io_counters()
        return counters.read_bytes + counters.write_bytes + counters.read_chars + counters.write_chars
    return 0


def _collectives_begun() -> int:
    """By this rank in the group of all; 0 where the backend does not count, or the group is closed."""
    try:
        return torch.distributed.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    except (RuntimeError, AttributeError):
        return 0
