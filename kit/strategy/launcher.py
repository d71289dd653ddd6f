"""React to what the launcher does: it may die, and torchrun may start the ranks again (``--max_restarts``)."""

import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import xxhash

from kit import lock
from kit.config.recipe import Recipe
from kit.interrupt import OWN_TORCHRUN
from kit.strategy.network import machine_id

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


def leads_other_machine() -> bool:
    """Return whether this is the first rank of a machine other than that of rank 0."""
    rank = launched_rank()
    return rank is not None and rank.several_machines and rank.rank > 0 and rank.local_rank == 0


def end_with_launcher() -> None:
    """Have this process sent one SIGTERM when its launcher, `accelerate launch` or torchrun, has died.

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


def launcher_is_gone() -> bool:
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


def launcher_id() -> str:
    """Return what identifies the launcher of this rank among those of all machines; empty without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    started = ""
    with suppress(OSError, IndexError):  # in ticks since the boot: process ids are reused
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return xxhash.xxh3_64_hexdigest(f"{machine_id()} {os.getppid()}-{started}".encode())


def recipe_after_restart(recipe: Recipe) -> Recipe:
    """Return the recipe for this start; ranks that torchrun restarted must continue the run, not begin it again.

    For them ``resume_from_checkpoint: none`` becomes ``auto``, and an ``overwrite_output_dir`` that was already carried
    out becomes false. The ranks were restarted if ranks of the same launcher have locked ``output_dir`` before: the
    lock file names their launchers. torchrun's own count of restarts would not show it: each machine counts for itself.
    """
    signed = lock.read(Path(recipe.output_dir or ""))
    if launcher_id() not in signed.get("launchers", ()):
        return recipe
    update: dict[str, Any] = {}
    if recipe.resume_from_checkpoint == "none":
        update["resume_from_checkpoint"] = "auto"
    if signed.get("emptied"):
        update["overwrite_output_dir"] = False
    return recipe.model_copy(update=update)


def record_exit(status: int) -> None:
    """Store the exit status of this rank for ``torchrun_main``: after a signal, torchrun does not say how ranks end."""
    if path := os.environ.get(OWN_TORCHRUN):
        with suppress(OSError):
            Path(path).write_text(str(status), encoding="ascii")
