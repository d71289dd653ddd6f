"""Where every rank is: so that a rank that died or hangs is named, with the phase and the step the others wait in.

Each rank tells its place to the store through which the ranks found each other; a thread tells that it is alive. A rank
that moves nowhere for the time-out, or one whose collective failed, reads the places of all and says who is missing.
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

import torch

from kit.errors import TrainingError

if TYPE_CHECKING:
    from accelerate import Accelerator

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0  # without a beat: the process is dead, stopped, or cut off


@dataclass(frozen=True)
class Place:
    """How far a rank has come. ``collectives``: how many it has begun, counted by torch."""

    rank: int
    beats: int
    step: int = 0
    phase: str = "an unknown place"
    collectives: int = 0
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} in {self.phase}" + (f" of step {self.step}" if self.step else "")


class Watch:
    """The places of all ranks; one rank alone needs none and keeps only its own."""

    def __init__(self, accelerator: "Accelerator", store: Any, timeout_seconds: float) -> None:
        """``store``: a connection of its own to the ranks' key-value store; None where there is one rank."""
        self._rank, self._world = accelerator.process_index, accelerator.num_processes
        self._store, self._timeout = store, timeout_seconds
        self._step, self._phase, self._moved = 0, "start", time.monotonic()
        if store is not None:
            threading.Thread(target=self._beat, daemon=True).start()

    def at(self, phase: str, step: int = 0) -> None:
        """This rank begins ``phase`` of 1-based ``step``."""
        self._step, self._phase, self._moved = step, phase, time.monotonic()

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
        first = str(error).strip().splitlines()[0]
        return TrainingError(f"{_names(gone)} is gone, last seen: {'; '.join(map(str, gone))} ({first})")

    def _beat(self) -> None:
        beats = last = 0
        while True:
            collectives = _collectives_begun()
            if collectives != last:
                last, self._moved = collectives, time.monotonic()
            beats += 1
            with suppress(RuntimeError):  # the store went with its process: whoever asks it next will say so
                place = Place(
                    self._rank, beats, self._step, self._phase, collectives, socket.gethostname(), os.getpid()
                )
                self._store.set(str(self._rank), json.dumps(asdict(place)))
            if time.monotonic() - self._moved > self._timeout:
                # In a thread of its own, for this rank is not silent.
                threading.Thread(target=self._give_up, daemon=True).start()
                self._moved = float("inf")
            time.sleep(BEAT_SECONDS)

    def _give_up(self) -> None:
        """A collective that never ends cannot be left by an exception: say why, and end the process."""
        waited = f"{self._timeout} s without a move (--ddp_timeout) in {self._phase}"
        waited += f" of step {self._step}" if self._step else ""
        gone, places = self._survey()
        furthest = max(place.collectives for place in places)
        absent = gone or [place for place in places if place.collectives < furthest]
        if absent:
            said = f"{_names(absent)} did not arrive, last seen: {'; '.join(map(str, absent))}"
        else:
            said = "every rank waits for the others: a GPU or the network between them hangs"
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
        return [place for old, place in zip(before, places, strict=True) if place.beats == old.beats], places

    def _places(self) -> list[Place]:
        try:
            return [Place(**json.loads(self._store.get(str(rank)))) for rank in range(self._world)]
        except RuntimeError:  # the store is kept by the launcher, or else by rank 0
            return [Place(rank, time.monotonic_ns() if rank else 0) for rank in range(self._world)]


def _collectives_begun() -> int:
    """By this rank in the group of all; 0 where the backend does not count, or the group is closed."""
    try:
        return torch.distributed.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    except (RuntimeError, AttributeError):
        return 0


def _names(places: list[Place]) -> str:
    return f"rank{'s' if len(places) > 1 else ''} {', '.join(str(place.rank) for place in places)}"
