"""Why a process failed, for those of other machines: a note in the key-value store by which they meet.

There are two stores. The launchers of the kit meet in one, at ``main_process_ip``; a note there ends the others also
while they wait for the first time, or while their ranks check data. The ranks meet in one that the launcher of rank 0
keeps; a note there ends them whichever launcher started them.

Promises: the first note of a start stays. Leaving one never raises, and takes a few seconds at most. Where a launcher
restarts its ranks there are no notes: it decides who ends.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from kit.console import say
from kit.errors import TrainingError
from kit.strategy.launcher import launched_rank
from kit.strategy.machines import Machines
from kit.strategy.store import STORE_SECONDS, call_within, connect

# Environment variable with a name of the run, which is the same on each machine. Another run may meet at the same port.
RUN = "KIT_RUN"
READ_SECONDS = 3.0  # in which the others read a note
LATE_SECONDS = 30.0  # the same, of machines whose command was started a little later
_POLL_SECONDS = 0.1
_KEY = "kit/failure"


@dataclass(frozen=True)
class FailureNote:
    """Who failed, and why."""

    who: str  # "rank 1 on beta"
    status: int  # its exit status
    text: str  # its error message, without credentials


class FailedElsewhere(TrainingError):
    """Another process failed, and this one ends because of it: with the same exit status, and without a note."""

    def __init__(self, note: FailureNote) -> None:
        self.exit_status = note.status
        super().__init__(f"{note.who} failed, and so this run ends:\n{note.text.strip().removeprefix('error: ')}")


def rank_notes_are_used() -> bool:
    """Return whether the ranks of this start leave and read notes: they are on several machines, and start once."""
    rank = launched_rank()
    return rank is not None and rank.several_machines and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"


def own_name() -> str:
    """Return the name of this process in a note."""
    rank = launched_rank()
    return f"rank {rank.rank} on {socket.gethostname()}" if rank else socket.gethostname()


def find_note(store: Any, run: str = "") -> FailureNote | None:
    """Return the note in a store, and count this process as one that has read it; None if there is none."""
    if not store.check([_KEY + run]):
        return None
    note = FailureNote(**json.loads(store.get(_KEY + run)))
    store.add(f"{_KEY}{run}/read", 1)
    return note


def leave_note(store: Any, note: FailureNote, readers: int, seconds: float = READ_SECONDS, run: str = "") -> None:
    """Write ``note`` and wait at most ``seconds`` until as many have read it; if there is one already, read that."""
    text = json.dumps(asdict(note))
    if store.compare_set(_KEY + run, "", text).decode() != text:
        find_note(store, run)  # counts this process, for which who wrote it would wait
        return
    end = time.monotonic() + seconds
    while store.add(f"{_KEY}{run}/read", 0) < readers and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def report_to_others(status: int, text: str) -> None:
    """Leave a note for the other machines of this run, if there are any, before this process ends.

    Args:
        text: the error message; empty: the others know.
    """
    if not text:
        return
    note = FailureNote(own_name(), status, text)
    rank = launched_rank()
    if rank is not None and rank_notes_are_used():
        address, port, readers = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank.world - 1
        _bounded(READ_SECONDS, lambda: leave_note(connect(address, port, STORE_SECONDS), note, readers))
    elif rank is None and _machines:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's store warns of machines that are not there yet
        # The machine that keeps the store has no launcher yet that does.
        say(f"reporting this to the other machines, at most {LATE_SECONDS:.0f} s; Ctrl-C leaves at once")
        with suppress(KeyboardInterrupt):
            report_to_machines(_machines[0], note, LATE_SECONDS, keeps_store=_machines[0].is_host)


def report_to_machines(machines: Machines, note: FailureNote, seconds: float, keeps_store: bool = False) -> None:
    """Leave a note for the launchers of the other machines.

    Args:
        seconds: how long to wait until they have read it.
        keeps_store: whether this process keeps the store until then.
    """

    def leave() -> None:
        store = connect(machines.address, machines.port, seconds, keeps_store)
        leave_note(store, note, machines.count - 1, seconds, os.environ[RUN])

    _bounded(seconds, leave)


def meets_at(machines: Machines, run: str) -> None:
    """Note where the launcher that this process will start meets those of the other machines.

    Args:
        run: a name of the run that is the same on all of them.
    """
    _machines[:] = [machines]
    os.environ[RUN] = run


def forget_machines() -> None:
    """Forget the machines of a command that ran in this process before."""
    _machines.clear()


def _bounded(seconds: float, call: Callable[[], None]) -> None:
    # RuntimeError: torch's errors of a store are such.
    with suppress(TimeoutError, RuntimeError, OSError):
        call_within(seconds + STORE_SECONDS, call)


_machines: list[Machines] = []  # none or one
