"""Start ``recipes/finetune.py`` as a user would, watch it, and kill it. No process is left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from kit.config.recipe import RECIPES
from kit.system.console import show

SCRIPT = RECIPES / "finetune.py"
POLL_SECONDS = 0.002  # a tenth of the duration of a step of a tiny model


class ScriptFailed(Exception):
    """The script ended by itself with an exit status other than 0."""

    def __init__(self, status: int, text: str) -> None:
        """``text``: the error message of the script."""
        self.status = status
        super().__init__(text)


# What a command that starts the script sets, whatever the user's recipe says: a run for itself, every step logged.
SET = {
    "logging_steps": "1",
    "predict_with_generate": "false",
    "report_to": "none",
    "push_to_hub": "none",
    "resume_from_checkpoint": "auto",
    "overwrite_output_dir": "false",
}


def run_script(flags: Mapping[str, str], temporary: Path, until: Callable[[], bool] = lambda: False) -> bool:
    """Start the script and wait for its end, or kill all its processes as soon as ``until`` returns true.

    Args:
        flags: of the script.
        temporary: for its output; the ``TMPDIR`` of all processes, by which ``kill_all`` finds them.

    Returns:
        Whether the script was killed.

    Raises:
        ScriptFailed: the script ended by itself with an exit status other than 0.
    """
    log = temporary / "log"
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in flags.items())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach only this process, which then kills the others
            env={**os.environ, "TMPDIR": str(temporary)},
        )
    is_due = False
    while (status := process.poll()) is None and not is_due:
        is_due = until()
        time.sleep(POLL_SECONDS)
    kill_all(temporary)
    process.wait()
    if status:
        text = log.read_text(encoding="utf-8", errors="replace")
        error = re.search(r"^error: .*(\n[ \t]+\S.*)*", text, re.MULTILINE)  # without the lines of a launcher
        end = "\n".join([*text.splitlines()[-60:], f"error: the run ended with status {status}"])
        raise ScriptFailed(max(status, 1), error[0] if error else end)
    show(f"    {'killed' if is_due else 'done'} after {time.monotonic() - began:.0f} s")
    return is_due


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a temporary folder. At the end, delete it and kill every process that has it as its ``TMPDIR``.

    In the ``with`` block, SIGTERM and SIGHUP (a closed terminal) act like Ctrl-C.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # `nohup` and background jobs ignore some of them; these stay ignored.
    handlers = {number: old for number in signals if (old := signal.getsignal(number)) != signal.SIG_IGN}

    def leave(number: int, frame: Any) -> NoReturn:
        for other in handlers:  # a second signal must not interrupt the clean-up
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    folder = Path(tempfile.mkdtemp(prefix="kit-"))
    try:
        for number in handlers:
            signal.signal(number, leave)
        yield folder
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        kill_all(folder)
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def kill_all(temporary: Path) -> None:
    """Kill every process that has this ``TMPDIR`` (SIGKILL), and wait until they are gone.

    Launchers put ranks in sessions of their own, and ranks whose launcher has died have no parent, so the processes
    can only be found by their environment.
    """
    stopped: set[psutil.Process] = set()
    while found := _processes(temporary) - stopped:  # a suspended process starts no other and saves nothing
        for process in found:
            with suppress(psutil.Error):
                process.suspend()
        stopped |= found
    for process in stopped:
        with suppress(psutil.Error):
            process.kill()
    while _processes(temporary):
        time.sleep(0.01)


def _processes(temporary: Path) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("TMPDIR") == str(temporary):
                found.add(process)
    return found
