"""React to what the launcher does: it may die, and torchrun may start the ranks again (``--max_restarts``)."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from kit import lock
from kit.config.recipe import Recipe

PR_SET_PDEATHSIG = 1  # an option of Linux's prctl


# Environment variable with the process id of `accelerate launch`. Set before torchrun starts the ranks, so that they
# inherit it.
ACCELERATE_PID = "KIT_ACCELERATE_PID"


def end_with_launcher() -> None:
    """Ask the kernel to send this process a SIGTERM when its launcher dies. Linux only.

    `accelerate launch` does not forward signals, so without this the script would continue after its launcher ended.
    """
    if not sys.platform.startswith("linux") or not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & set(
        os.environ
    ):
        return
    with suppress(OSError):
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        if (
            b"accelerate" in parent or b"torch" in parent
        ):  # else it is a shell that has these variables in its environment
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # stays in effect after exec
            if "RANK" not in os.environ:
                os.environ[ACCELERATE_PID] = str(os.getppid())


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


def continue_restarted(recipe: Recipe) -> Recipe:
    """Return the recipe for this start; ranks that torchrun restarted must continue the run, not begin it again.

    For them ``resume_from_checkpoint: none`` becomes ``auto``, and an ``overwrite_output_dir`` that was already carried
    out becomes false. The ranks were restarted if the lock file of ``output_dir`` was signed after their launcher
    started. torchrun's own count of restarts cannot be used, because each machine counts for itself.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return recipe
    signed = lock.read(Path(recipe.output_dir or ""))
    try:
        if not signed or signed["at"] < psutil.Process(os.getppid()).create_time():
            return recipe
    except psutil.Error:
        return recipe
    update = {"resume_from_checkpoint": "auto"} if recipe.resume_from_checkpoint == "none" else {}
    return recipe.model_copy(update=update | ({"overwrite_output_dir": False} if signed.get("emptied") else {}))


def remember_end(status: int) -> None:
    """Store the exit status for ``stay_ended`` if torchrun may restart the ranks (``--max_restarts``).

    torchrun restarts ranks whatever their exit status is. After a user's mistake or a stop by signal this is useless.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        with suppress(OSError):
            _end_file().parent.mkdir(parents=True, exist_ok=True)
            for old in _end_file().parent.iterdir():  # delete files that are older than a day
                if time.time() - old.stat().st_mtime > 86400:
                    old.unlink()
            _end_file().write_text(str(status))


def stay_ended() -> None:
    """End a restarted rank at once with the exit status that ``remember_end`` stored for the same launcher, if any."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        with suppress(OSError, ValueError):
            os._exit(int(_end_file().read_text()))


def _end_file() -> Path:
    """The file for the exit status, named after the launcher's process id and its start time, as ids are reused."""
    from kit.cache import cache_folder

    parent = os.getppid()
    with suppress(OSError, IndexError):
        started = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
        return cache_folder() / "ended" / f"{parent}-{started}"
    return cache_folder() / "ended" / str(parent)
