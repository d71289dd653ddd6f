"""Which ranks are gone, and which did not arrive: one rank finds out for all that ask at that time.

After a failure every rank asks at once, and launchers end all ranks 30 s later. So the work of the store must not grow
with the square of the ranks. The first rank that asks leads a survey: it reads the statuses of all ranks twice, each
time in one call, and writes a verdict. The others wait for the verdict.

Promises:

- Each rank makes a number of calls that does not depend on the number of ranks, the leader too. What a rank is sent has
  a constant size; only the leader is sent a status of each rank.
- A verdict that names nobody is given only to ranks that asked before its survey began.
- If a leader dies, another rank leads.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kit.phases import STARTING
from kit.strategy.store import STORE_SECONDS, BoundedStore

SILENT_SECONDS = 4.0  # a rank without a beat for this time is dead, stopped, or has lost its network
_WAIT_SECONDS = SILENT_SECONDS + STORE_SECONDS  # for a verdict; a leader that takes longer has died too
_POLL_SECONDS = 0.25
_MOST_LEADERS = 2  # that may die before a rank surveys for itself
_MOST_LISTED = 8  # ranks that a verdict and a message list


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
class RankList:
    """A list of ranks. Only the first ``_MOST_LISTED`` have a status here: nobody reads thousands."""

    count: int
    first: list[RankStatus]

    def names(self) -> str:
        """``rank 3``; ``ranks 3, 5 and 510 more``."""
        return f"rank{'s' if self.count > 1 else ''} {', '.join(str(status.rank) for status in self.first)}{self.more}"

    @property
    def more(self) -> str:
        """The end of a list of ``first``: how many it leaves out."""
        left_out = self.count - len(self.first)
        return f" and {left_out} more" if left_out else ""


@dataclass(frozen=True)
class Survey:
    """What a survey found."""

    gone: RankList  # their beats do not increase; so the clocks of several machines need not agree
    absent: RankList  # those that the others wait for: gone, else behind in collectives, else saving, else all
    is_progressing: bool  # whether a rank that is not gone made progress recently

    @classmethod
    def of(cls, before: list[RankStatus], after: list[RankStatus], timeout_seconds: float) -> "Survey":
        """Compare two statuses of each rank, ``SILENT_SECONDS`` apart."""
        gone = [new for old, new in zip(before, after, strict=True) if old.beats == new.beats]
        alive = [new for old, new in zip(before, after, strict=True) if old.beats != new.beats]
        furthest = max(status.collectives for status in after)
        behind = [status for status in after if status.collectives < furthest]
        saving = [status for status in after if status.save]
        absent = gone or behind or saving or after
        # Half the time-out, because the ranks did not all begin to wait at the same time.
        is_progressing = any(status.idle_seconds < timeout_seconds / 2 for status in alive)
        return cls(_rank_list(gone), _rank_list(absent), is_progressing)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Survey":
        """Read what a leader wrote."""
        *parts, is_progressing = json.loads(text)
        gone, absent = (RankList(part["count"], [RankStatus(**each) for each in part["first"]]) for part in parts)
        return cls(gone, absent, is_progressing)

    def to_json(self) -> str:
        """Return the verdict as a leader writes it."""
        return json.dumps([asdict(self.gone), asdict(self.absent), self.is_progressing])


def _rank_list(statuses: list[RankStatus]) -> RankList:
    return RankList(len(statuses), statuses[:_MOST_LISTED])


class Surveys:
    """The surveys of a run. Each rank has one, with a store that only these have."""

    def __init__(self, store: BoundedStore, world: int, timeout_seconds: float, keeps_store: bool = False) -> None:
        """
        Args:
            timeout_seconds: if no rank makes progress for this time, the run ends.
            keeps_store: whether the store may end with this process.
        """
        self._store = store
        self._world = world
        self._timeout = timeout_seconds
        self._keeps_store = keeps_store
        self._rank_0 = RankStatus(0)  # its last status: who asks after the store is gone cannot read it any more

    def write(self, status: RankStatus) -> None:
        """Write the status of this rank, and read that of rank 0. Raises like ``BoundedStore.call``."""
        text = json.dumps(asdict(status))

        def exchange(store: Any) -> bytes | None:
            store.set(str(status.rank), text)
            is_there = status.rank and (self._rank_0.beats or store.check(["0"]))
            return store.get("0") if is_there else None

        if rank_0 := self._store.call(exchange):
            self._rank_0 = RankStatus(**json.loads(rank_0))

    def ask(self) -> Survey:
        """Return who is gone and who is absent: of a survey that another rank leads, or of an own one.

        If the store is gone, rank 0 is: the launcher keeps the store, or else rank 0.

        Raises:
            TimeoutError: the store does not answer.
        """
        found = self._ask()
        if self._keeps_store:
            time.sleep(2 * _POLL_SECONDS)  # until the others have read the verdict too
        return found

    def _ask(self) -> Survey:
        try:
            begun: int = self._store.call(lambda store: store.add("begun", 0))  # the number of the last survey
            last = self._verdict_of(begun) if begun else None
            # It may have begun before another rank died, but the ranks that it names are gone. Ranks that ended because
            # of them are not named: so a survey that is over counts too.
            if last is not None and last.gone.count and self._are_silent_since(last.gone.first):
                return last
            for number in range(begun + 1, begun + 1 + _MOST_LEADERS):
                if self._is_leader_of(number):
                    return self._lead(number)
                verdict = self._verdict_of(number)
                if verdict is not None:
                    return verdict
            return self._survey()
        except RuntimeError:
            rank_0 = RankList(1, [self._rank_0])
            return Survey(rank_0, rank_0, is_progressing=False)

    def _is_leader_of(self, number: int) -> bool:
        return self._store.call(lambda store: store.add(f"leader/{number}", 1)) == 1

    def _lead(self, number: int) -> Survey:
        # Never to a lower number: a leader that was paused here must not make an old verdict the last one.
        self._store.call(lambda store: store.add("begun", max(0, number - store.add("begun", 0))))
        found = self._survey()
        self._store.call(lambda store: store.set(f"verdict/{number}", found.to_json()))
        return found

    def _are_silent_since(self, statuses: list[RankStatus]) -> bool:
        """Whether these ranks, a few, have written no other status since these."""
        return self._read_statuses([status.rank for status in statuses]) == statuses

    def _verdict_of(self, number: int) -> Survey | None:
        """Wait for the verdict of a survey; None if its leader has died."""

        def read(store: Any) -> bytes | None:
            # A ``get`` that waits would keep this rank's beats waiting.
            return store.get(f"verdict/{number}") if store.check([f"verdict/{number}"]) else None

        end = time.monotonic() + _WAIT_SECONDS
        while (text := self._store.call(read)) is None:
            if time.monotonic() > end:
                return None
            time.sleep(_POLL_SECONDS)
        return Survey.from_json(text)

    def _survey(self) -> Survey:
        before = self._read_statuses(range(self._world))
        time.sleep(SILENT_SECONDS)
        return Survey.of(before, self._read_statuses(range(self._world)), self._timeout)

    def _read_statuses(self, ranks: Sequence[int]) -> list[RankStatus]:
        """The last status of each of these ranks; of a rank that never wrote one, the status at the start."""
        keys = [str(rank) for rank in ranks]

        def read(store: Any) -> list[bytes | None]:
            if store.check(keys):
                return list(store.multi_get(keys))
            return [store.get(key) if store.check([key]) else None for key in keys]

        texts = self._store.call(read)
        pairs = zip(ranks, texts, strict=True)
        return [RankStatus(**json.loads(text)) if text else RankStatus(rank) for rank, text in pairs]
