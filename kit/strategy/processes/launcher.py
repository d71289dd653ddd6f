"""The launcher of this process: the rank that it gave, and what to do when it dies."""

import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from kit.system.errors import Problem
from kit.system.interrupt import OWN_TORCHRUN

# Environment variable with the process id of `accelerate launch`. Set before torchrun starts the ranks, so that they
# inherit it.
ACCELERATE_PID = "KIT_ACCELERATE_PID"
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LaunchedRank:
    """The rank that a launcher gave this process, and the number of ranks, over all machines and on this one."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def several_machines(self) -> bool:
        """Whether other machines have ranks too."""
        return self.world > self.local_world


def launched_rank() -> LaunchedRank | None:
    """Return the rank that a launcher gave this process; None if no launcher of several ranks started it."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    return LaunchedRank(rank, world, int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", world)))


def cores_of_rank() -> int:
    """Return this machine's cores for each of its ranks, at least 1."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def leads_other_machine() -> bool:
    """Return whether this is the first rank of a machine other than that of rank 0."""
    rank = launched_rank()
    return rank is not None and rank.several_machines and rank.rank > 0 and rank.local_rank == 0


def started_again() -> Problem:
    """Return the problem of ranks that the launcher (torchrun) restarted.

    They would start the run again, and not resume it.
    """
    found = "the launcher restarted these ranks"
    return Problem("--max_restarts", found, "0", "type the same command again: it resumes the run")


def end_with_launcher() -> None:
    """Send this process one SIGTERM when its launcher, `accelerate launch` or torchrun, has died.

    `accelerate launch` does not forward signals, so without this the script would continue after its launcher ended.
    """
    is_launched = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID", ACCELERATE_PID} & set(os.environ)
    if "RANK" not in os.environ:
        os.environ.pop(ACCELERATE_PID, None)  # perhaps of a command that started this one
    if not is_launched:
        return
    with suppress(psutil.Error):
        launcher = psutil.Process(os.getppid())
        words = " ".join(launcher.cmdline())
        if "accelerate" in words or "torch" in words:  # else it is a shell that has these variables in its environment
            if "RANK" not in os.environ:
                os.environ[ACCELERATE_PID] = str(launcher.pid)
            # Not PR_SET_PDEATHSIG: the kernel sends that signal also when a mere thread of the launcher ends. The
            # launcher seems alive at that moment, and a second SIGTERM follows: both look like a user's.
            threading.Thread(target=_end_after, args=(launcher.pid,), name="end with launcher", daemon=True).start()


def _end_after(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def launcher_has_ended() -> bool:
    """Return whether `accelerate launch` started this command and has ended since.

    A SIGTERM may then be an effect of that end (``end_with_launcher``), and not a request of the user: one Ctrl-C ends
    `accelerate launch` within seconds, whatever its children do.
    """
    pid = int(os.environ.get(ACCELERATE_PID, "0"))
    if not pid or "RANK" not in os.environ:
        return bool(pid) and os.getppid() != pid
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def num_processes_of_accelerate() -> int | None:
    """Return the ``--num_processes`` that `accelerate launch`, the parent of this process, was given; None without."""
    with suppress(psutil.Error, ValueError):
        words = psutil.Process(os.getppid()).cmdline()
        if not any("accelerate" in word for word in words[:3]) or sys.argv[0] not in words:
            return None
        own = " ".join(words[: words.index(sys.argv[0])]).replace("-processes", "_processes")
        if found := re.search(r"--num_processes[ =](\d+)", own):
            return int(found[1])
    return None


def record_exit(status: int) -> None:
    """Store the exit status of this rank for ``torchrun_main``: after a signal, torchrun does not say how ranks end."""
    if path := os.environ.get(OWN_TORCHRUN):
        with suppress(OSError):
            Path(path).write_text(str(status), encoding="ascii")
