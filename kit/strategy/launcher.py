"""The process that started this one: what follows from its death, and from its starting ranks a second time."""

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

PR_SET_PDEATHSIG = 1  # of Linux


# In the environment: the process of `accelerate launch` above this command, or above its torchrun and the ranks.
ACCELERATE_PID = "KIT_ACCELERATE_PID"


def end_with_launcher() -> None:
    """Have the kernel send this process a SIGTERM when its launcher dies.

    `accelerate launch` does not pass signals on: without this the script would outlive it.
    """
    if not sys.platform.startswith("linux") or not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & set(
        os.environ
    ):
        return
    with suppress(OSError):
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        if b"accelerate" in parent or b"torch" in parent:  # not a shell with these in its environment
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # outlives exec
            if "RANK" not in os.environ:
                os.environ[ACCELERATE_PID] = str(os.getppid())


def launcher_is_gone() -> bool:
    """Whether this command was started by `accelerate launch` and that process has ended.

    A SIGTERM may then come from its death alone: one Ctrl-C ends it within seconds, whatever its children are doing.
    """
    pid = int(os.environ.get(ACCELERATE_PID, "0"))
    if not pid or "RANK" not in os.environ:
        return bool(pid) and os.getppid() != pid
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def continue_restarted(recipe: Recipe) -> Recipe:
    """The recipe for this start: ranks that torchrun starts a second time continue the run instead of beginning it.

    They are known by the lock file of ``output_dir``: it was signed after their launcher was started. torchrun's own
    count of restarts cannot be used, since each machine counts for itself.
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
    """Note the exit status, so that ranks which torchrun's ``--max_restarts`` starts again end with it at once.

    torchrun restarts ranks whatever they ended with. For a user's mistake or a stop by signal that gains nothing.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        with suppress(OSError):
            _end_file().parent.mkdir(parents=True, exist_ok=True)
            for old in _end_file().parent.iterdir():
                if time.time() - old.stat().st_mtime > 86400:
                    old.unlink()
            _end_file().write_text(str(status))


def stay_ended() -> None:
    """Leave at once, with the status that ``remember_end`` noted for the ranks of this launcher, if there is one."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        with suppress(OSError, ValueError):
            os._exit(int(_end_file().read_text()))


def _end_file() -> Path:
    """A file named after the launcher's process and its start time, since process ids are used again."""
    from kit.cache import cache_folder

    parent = os.getppid()
    with suppress(OSError, IndexError):
        started = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
        return cache_folder() / "ended" / f"{parent}-{started}"
    return cache_folder() / "ended" / str(parent)
