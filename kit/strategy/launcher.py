"""React to what the launcher does: it may die, and torchrun may start the ranks again (``--max_restarts``)."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import xxhash

from kit import durable, lock
from kit.config.recipe import Recipe
from kit.interrupt import OWN_TORCHRUN
from kit.strategy.network import machine_id

# Environment variable with the process id of `accelerate launch`. Set before torchrun starts the ranks, so that they
# inherit it.
ACCELERATE_PID = "KIT_ACCELERATE_PID"
_POLL_SECONDS = 0.2
GRACE_SECONDS = 8.0  # in which torchrun has ended if it can reach the other machines
# A process of its own, because it outlives the rank. It ends with the launcher, whose id may be reused.
_END_LATER = """
import psutil, sys
launcher = psutil.Process(int(sys.argv[1]))
if launcher.create_time() == float(sys.argv[2]):
    try:
        launcher.wait(float(sys.argv[3]))
    except psutil.TimeoutExpired:
        launcher.kill()
"""


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


def launcher_id() -> str:
    """Return what identifies the launcher of this rank among those of all machines; empty without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return xxhash.xxh3_64_hexdigest(f"{machine_id()} {_process_id(os.getppid())}".encode())


def recipe_after_restart(recipe: Recipe) -> Recipe:
    """Return the recipe for this start; ranks that torchrun restarted must continue the run, not begin it again.

    For them ``resume_from_checkpoint: none`` becomes ``auto``, and an ``overwrite_output_dir`` that was already carried
    out becomes false. The ranks were restarted if ranks of the same launcher have locked ``output_dir`` before: the
    lock file names their launchers. Times would not show it, because the clocks of two machines differ; nor does
    torchrun's own count of restarts, because each machine counts for itself.
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


def end_launcher_later() -> None:
    """Have the launcher killed if it still lives ``GRACE_SECONDS`` from now. A rank that failed calls it.

    torchrun ends its ranks when one fails, but then waits up to a quarter of an hour for a machine that is not
    reachable. On one machine this does nothing. A launcher that restarts ranks is left alone: it may wait for that
    machine with good reason.
    """
    rank = launched_rank()
    if rank is None or not rank.several_machines or os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        return
    with suppress(OSError, psutil.Error):
        started = psutil.Process(os.getppid()).create_time()
        # -P: without it a psutil.py in the current folder would be imported.
        command = [sys.executable, "-P", "-c", _END_LATER, str(os.getppid()), str(started), str(GRACE_SECONDS)]
        subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)  # fmt: skip


def record_exit(status: int, is_final: bool, killed: Iterable[int] = (), text: str = "") -> None:
    """Store the exit status of this rank for its launcher.

    torchrun restarts ranks whatever their exit status is (``--max_restarts``). If ``is_final`` this is useless, and
    ``exit_if_recorded`` prevents it. ``kit.strategy.torchrun`` ends with the status that is stored.

    Args:
        killed: process ids of ranks that this one kills because they hang.
        text: the error message of this rank, for the launchers of other machines.
    """
    restarts = is_final and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts or OWN_TORCHRUN in os.environ:
        from kit.cache import delete_old, make_folder

        with suppress(OSError):
            file = _end_file(os.getppid())
            make_folder(file.parent.name)
            delete_old(file.parent)
            numbers = " ".join(map(str, [status, *killed, *recorded_kills(os.getppid())]))
            durable.write_text(file, f"{numbers}\n{text or recorded_text(os.getppid())}")


def exit_if_recorded() -> None:
    """End a restarted rank at once with the exit status that ``record_exit`` stored for the same launcher, if any."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return
    status = recorded_exit(os.getppid())
    if status is not None:
        os._exit(status)


def recorded_exit(launcher: int) -> int | None:
    """Return the exit status that a rank under the launcher with this process id stored; None if there is none."""
    with suppress(OSError, ValueError, IndexError):
        return int(_recorded(launcher)[0].split()[0])
    return None


def recorded_kills(launcher: int) -> list[int]:
    """Return the process ids of the ranks under this launcher that another one killed because they hung."""
    with suppress(OSError, ValueError):
        return [int(word) for word in _recorded(launcher)[0].split()[1:]]
    return []


def recorded_text(launcher: int) -> str:
    """Return the error message of a rank under this launcher that failed; empty if none was stored."""
    with suppress(OSError, ValueError):
        return _recorded(launcher)[2]
    return ""


def _recorded(launcher: int) -> tuple[str, str, str]:
    return _end_file(launcher).read_text(encoding="utf-8").partition("\n")


def _end_file(launcher: int) -> Path:
    """The file for the exit status, named after the launcher."""
    from kit.cache import cache_folder

    return cache_folder() / "ended" / _process_id(launcher)


def _process_id(pid: int) -> str:
    """The process id and the start of a process, in ticks since the boot, as ids are reused."""
    with suppress(OSError, IndexError):
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
        return f"{pid}-{started}"
    return str(pid)
