"""Find ranks that exited or never reached a collective, from two statuses of each rank some seconds apart."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kit.strategy.processes.tcp_store import BoundedStore
from kit.system.errors import listed
from kit.system.phases import STARTING

SILENT_SECONDS = 4.0  # a rank without a heartbeat for this time exited, is stopped, or has lost its network
_MOST_LISTED = 8  # ranks in a message


@dataclass(frozen=True)
class RankStatus:
    """The progress of a rank; each rank writes its own status with every heartbeat."""

    rank: int
    heartbeats: int = 0  # statuses written so far
    step: int = 0  # from 1; 0 outside the steps
    phase: str = STARTING.doing
    save: str = ""  # its work on an asynchronous checkpoint; empty: none
    collectives: int = 0  # collectives started so far, counted by torch
    idle_seconds: float = 0.0  # since its last progress
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Survey:
    """The result of comparing two statuses of each rank."""

    silent: list[RankStatus]  # without a new heartbeat; clocks of several machines need not agree
    missing: list[RankStatus]  # the others wait for them: silent, else fewer collectives, else saving, else all
    is_progressing: bool  # whether a rank with heartbeats made progress recently

    @classmethod
    def of(cls, before: Sequence[RankStatus], after: Sequence[RankStatus], timeout_seconds: float) -> "Survey":
        """Compare two statuses of each rank, ``SILENT_SECONDS`` apart."""
        silent = [new for old, new in zip(before, after, strict=True) if old.heartbeats == new.heartbeats]
        alive = [new for old, new in zip(before, after, strict=True) if old.heartbeats != new.heartbeats]
        furthest = max(status.collectives for status in after)
        behind = [status for status in after if status.collectives < furthest]
        saving = [status for status in after if status.save]
        # Half the time-out, because the ranks did not all begin to wait at the same time.
        is_progressing = any(status.idle_seconds < timeout_seconds / 2 for status in alive)
        return cls(silent, silent or behind or saving or list(after), is_progressing)


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
    """Return the last action of each rank; ``host``: the machine that prints it."""
    parts = []
    for status in ranks:
        where = f" on {status.host}" if status.host not in ("", host) else ""
        step = f" in step {status.step}" if status.step else ""
        parts.append(f"rank {status.rank}{where} {status.phase}{step}" + (f", {status.save}" if status.save else ""))
    return listed(parts, _MOST_LISTED, "; ")
