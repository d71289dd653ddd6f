"""Which ranks are gone, and which did not arrive: two statuses of each rank, some seconds apart, say it."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kit.strategy.processes.tcp_store import BoundedStore
from kit.system.errors import listed
from kit.system.phases import STARTING

SILENT_SECONDS = 4.0  # a rank without a beat for this time is dead, stopped, or has lost its network
_MOST_LISTED = 8  # ranks in a message


@dataclass(frozen=True)
class RankStatus:
    """How far a rank has come; each rank writes its own status with every beat."""

    rank: int
    beats: int = 0  # statuses written so far
    step: int = 0  # from 1; 0 outside the steps
    phase: str = STARTING.doing
    save: str = ""  # what it does for a checkpoint in the background; empty for nothing
    collectives: int = 0  # collectives begun so far, counted by torch
    idle_seconds: float = 0.0  # since its last progress
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Survey:
    """What two statuses of each rank say."""

    gone: list[RankStatus]  # their beats do not increase; so the clocks of several machines need not agree
    absent: list[RankStatus]  # those that the others wait for: gone, else behind in collectives, else saving, else all
    is_progressing: bool  # whether a rank that is not gone made progress recently

    @classmethod
    def of(cls, before: Sequence[RankStatus], after: Sequence[RankStatus], timeout_seconds: float) -> "Survey":
        """Compare two statuses of each rank, ``SILENT_SECONDS`` apart."""
        gone = [new for old, new in zip(before, after, strict=True) if old.beats == new.beats]
        alive = [new for old, new in zip(before, after, strict=True) if old.beats != new.beats]
        furthest = max(status.collectives for status in after)
        behind = [status for status in after if status.collectives < furthest]
        saving = [status for status in after if status.save]
        # Half the time-out, because the ranks did not all begin to wait at the same time.
        is_progressing = any(status.idle_seconds < timeout_seconds / 2 for status in alive)
        return cls(gone, gone or behind or saving or list(after), is_progressing)


def take_survey(store: BoundedStore, world: int, timeout_seconds: float) -> Survey:
    """Read the statuses of all ranks twice, and compare them. Raises like ``BoundedStore.call``."""
    before = store.call(lambda each: _statuses(each, world))
    time.sleep(SILENT_SECONDS)
    return Survey.of(before, store.call(lambda each: _statuses(each, world)), timeout_seconds)


def _statuses(store: Any, world: int) -> list[RankStatus]:
    """The last status of each rank; of a rank that never wrote one, the status at the start."""
    keys = list(map(str, range(world)))
    if store.check(keys):
        texts = store.multi_get(keys)
    else:
        texts = [store.get(key) if store.check([key]) else b"" for key in keys]
    return [RankStatus(**json.loads(text)) if text else RankStatus(rank) for rank, text in enumerate(texts)]


def names(ranks: Sequence[RankStatus]) -> str:
    """``rank 3``; ``ranks 3, 5 and 510 others``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(status.rank) for status in ranks], _MOST_LISTED)}"


def last_seen(ranks: Sequence[RankStatus], host: str) -> str:
    """Return what each of some ranks did last; ``host``: the machine of who reads it."""
    parts = []
    for status in ranks:
        where = f" on {status.host}" if status.host not in ("", host) else ""
        step = f" in step {status.step}" if status.step else ""
        parts.append(f"rank {status.rank}{where} {status.phase}{step}" + (f", {status.save}" if status.save else ""))
    return listed(parts, _MOST_LISTED, "; ")
