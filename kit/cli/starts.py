"""Start ``recipes/finetune.py`` as a user would, watch it, and kill it. No process is left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from kit.config.recipe import RECIPES
from kit.console import show

SCRIPT = RECIPES / "finetune.py"
POLL_SECONDS = 0.002  # a tenth of the duration of a step of a tiny model


class ScriptFailed(Exception):
    """The script ended by itself with an exit status other than 0."""

    def __init__(self, status: int, text: str) -> None:
        """``text``: the error message of the script."""
        self.status = status
        super().__init__(text)


class ScriptRunner:
    """Runs the script several times with the same flags, one run after the other."""

    def __init__(self, flags: dict[str, str], folder: Path, temporary: Path, num_titles: int = 3) -> None:
        """
        Args:
            flags: flags of the script, without ``output_dir``.
            folder: for the logs.
            temporary: the ``TMPDIR`` of all processes. ``kill_all`` finds them by it.
            num_titles: how many different titles there will be.
        """
        self.flags, self.folder, self.temporary = flags, folder, temporary
        self.num_titles = num_titles
        self.titles: list[str] = []  # printed so far

    def run(self, title: str, output_dir: Path, until: Callable[[], bool] | None = None, **flags: str) -> bool:
        """Start the script and wait for its end, or kill all its processes as soon as ``until`` returns true.

        Args:
            title: printed before the first run with this title.
            flags: of this run, besides those of all.

        Returns:
            Whether the script was killed.

        Raises:
            ScriptFailed: the script ended by itself with an exit status other than 0.
        """
        if title not in self.titles:
            self.titles.append(title)
            show(f"{len(self.titles)} of {self.num_titles}: {title}")
        words = [f"--{name}={value}" for name, value in {**self.flags, **flags, "output_dir": str(output_dir)}.items()]
        log = self.folder / f"{len(self.titles)}.log"
        began = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach only this process, which then kills the others
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )
        is_due = False
        while (status := process.poll()) is None and not is_due:
            is_due = until is not None and until()
            time.sleep(POLL_SECONDS)
        kill_all(self.temporary)
        process.wait()
        if status:
            raise _failure(
                f"{len(self.titles)} of {self.num_titles}", status, log.read_text(encoding="utf-8", errors="replace")
            )
        show(f"    {'killed' if is_due else 'done'} after {time.monotonic() - began:.0f} s")
        return is_due


def _failure(number: str, status: int, text: str) -> ScriptFailed:
    """The error message of the script, found in the log. A launcher adds lines, and turns exit status 2 into 1."""
    block = re.search(r"^error: (rank \d)?.*(\n[ \t]+\S.*)*", text, re.MULTILINE)
    if block:
        return ScriptFailed(max(status, 1) if block[1] else 2, block[0])
    end = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return ScriptFailed(max(status, 1), "\n".join([*text.splitlines()[-60:], f"error: run {number} {end}"]))


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
