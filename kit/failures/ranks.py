"""Where every rank is: so that a rank that died or hangs is named, with the phase and the step the others wait in.

Each rank tells its place to the store through which the ranks found each other; a thread tells that it is alive. When
no rank has moved for the time-out, or a collective failed, the places of all say who is missing. To move is to begin a
phase or a collective, to come forward in an evaluation, or to read or write: a slow disk is no hang.
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

if TYPE_CHECKING:
    from accelerate import Accelerator

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0  # without a beat: the process is dead, stopped, or cut off
MOVED_BYTES = 1 << 16  # to or from files within a beat


@dataclass(frozen=True)
class Place:
    """How far a rank has come, as it says itself with every beat."""

    rank: int
    beats: int = 0
    step: int = 0
    phase: str = "starting"
    save: str = ""  # what it does for a checkpoint in the background
    collectives: int = 0  # how many it has begun, counted by torch
    still_seconds: float = 0.0  # since it moved
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        where = f"rank {self.rank} {self.phase}" + (f" in step {self.step}" if self.step else "")
        return where + (f", {self.save}" if self.save else "")


class Watch:
    """The places of all ranks; one rank alone needs none and keeps only its own."""

    def __init__(self, accelerator: "Accelerator", store: Any, timeout_seconds: float) -> None:
        """``store``: a connection of its own to the ranks' key-value store; None where there is one rank."""
        self._rank, self._world = accelerator.process_index, accelerator.num_processes
        self._store, self._timeout = store, timeout_seconds
        self._step, self._phase, self._save, self._moved = 0, "starting", "", time.monotonic()
        self._asks = False
        if store is not None:
            threading.Thread(target=self._beat, daemon=True).start()

    def at(self, phase: str, step: int = 0) -> None:
        """This rank begins ``phase`` of 1-based ``step``."""
        self._step, self._phase, self._moved = step, phase, time.monotonic()

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
        return TrainingError(
            f"{_names(gone)} {are} gone, last seen: {_told(gone)}\n"
            f"    -> {it} why above, or was killed: by hand, by a scheduler, or for lack of memory (see `dmesg`);\n"
            "       the same command continues from the last checkpoint"
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
            place = Place(
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
                self._store.set(str(self._rank), json.dumps(asdict(place)))
            if now - self._moved > self._timeout and not self._asks:
                self._asks = True
                # In a thread of its own, for this rank is not silent.
                threading.Thread(target=self._ask_others, args=(self._moved,), daemon=True).start()
            time.sleep(BEAT_SECONDS)

    def _ask_others(self, moved: float) -> None:
        """End the process if no other rank moves either: what never ends cannot be left by an exception."""
        waited = f"{self._timeout} s without a move (--ddp_timeout), {self._phase}"
        waited += f" in step {self._step}" if self._step else ""
        gone, places = self._survey()
        others = [place for place in places if place not in gone and place.rank != self._rank]
        # Half a time-out, for they did not all begin to wait at the same time.
        if self._moved != moved or any(place.still_seconds < self._timeout / 2 for place in others):
            self._asks = False
            return
        furthest = max(place.collectives for place in places)
        absent = gone or [place for place in places if place.collectives < furthest]
        absent = absent or [place for place in places if place.save]
        if 0 < len(absent) < self._world:
            said = f"{_names(absent)} did not arrive, last seen: {_told(absent)}"
        else:
            said = f"every rank waits: a GPU, the network or a disk hangs ({_told(places)})"
        with suppress(OSError):  # nobody reads it
            print(f"\nerror: rank {self._rank}: {waited}; {said}", file=sys.stderr, flush=True)
        for place in gone:  # a stopped process does not hear the launcher's SIGTERM
            if place.host == socket.gethostname() and place.pid:
                with suppress(OSError):
                    os.kill(place.pid, signal.SIGKILL)
        os._exit(1)

    def _survey(self) -> tuple[list[Place], list[Place]]:
        """The ranks that give no sign of life, and all. Clocks of several machines are not compared."""
        before = self._places()
        time.sleep(SILENT_SECONDS)
        places = self._places()
        if not places:  # the store is kept by the launcher, or else by rank 0
            places = before or [Place(rank) for rank in range(self._world)]
            return places[:1], places
        silent = [place for place in places if before and place.beats == before[place.rank].beats]
        return silent, places

    def _places(self) -> list[Place]:
        """Empty without the store; a rank that never told its place is at the start, for ever."""
        try:
            known = [self._store.check([str(rank)]) for rank in range(self._world)]
            told = [
                json.loads(self._store.get(str(rank))) if known[rank] else {"rank": rank} for rank in range(self._world)
            ]
        except RuntimeError:
            return []
        return [Place(**place) for place in told]


def _names(places: list[Place]) -> str:
    return f"rank{'s' if len(places) > 1 else ''} {', '.join(str(place.rank) for place in places)}"


def _told(places: list[Place]) -> str:
    return "; ".join(map(str, places))


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
