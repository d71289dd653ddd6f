"""Start ``recipes/finetune.py`` as a user would, watch it, and kill it. No process is left."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from kit.config.paths import RECIPES
from kit.system.console import show

SCRIPT = RECIPES / "finetune.py"
POLL_SECONDS = 0.002  # a tenth of the duration of a step of a tiny model


class ScriptFailed(Exception):
    """The script ended by itself with an exit status other than 0."""

    def __init__(self, status: int, text: str) -> None:
        """``text``: the error message of the script."""
        self.status = status
        super().__init__(text)


# Flags of each run, whatever the user's recipe has: a run for itself, every step logged.
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
        temporary: for its output, and for the temporary files of all processes.

    Returns:
        Whether the script was killed.

    Raises:
        ScriptFailed: the script ended by itself with an exit status other than 0.
    """
    log = temporary / "log"
    began = time.monotonic()
    with log.open("wb") as file:
        script = psutil.Popen(
            [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in flags.items())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach only this process, which then kills the others
            env={**os.environ, "TMPDIR": str(temporary)},
        )
    is_due = False
    try:
        while (status := script.poll()) is None and not is_due:
            is_due = until()
            time.sleep(POLL_SECONDS)
    finally:
        _kill_all(script)
    if status:
        text = log.read_text(encoding="utf-8", errors="replace")
        error = re.search(r"^error: .*(\n[ \t]+\S.*)*", text, re.MULTILINE)  # without the lines of a launcher
        end = "\n".join([*text.splitlines()[-60:], f"error: the run ended with status {status}"])
        raise ScriptFailed(max(status, 1), error[0] if error else end)
    show(f"    {'killed' if is_due else 'done'} after {time.monotonic() - began:.0f} s")
    return is_due


def _kill_all(script: psutil.Process) -> None:
    """Kill the script and all that it has started (SIGKILL), and wait until they have ended."""
    processes = [script]
    with suppress(psutil.Error):
        script.suspend()  # it starts no other
        processes += script.children(recursive=True)
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes)
