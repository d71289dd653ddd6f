"""Starts of ``recipes/finetune.py`` as a user would type them, watched, killed, and leaving no process behind."""

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


SECONDS_BETWEEN_LOOKS = 0.002  # a step of a tiny model takes ten times as long


class RunFailed(Exception):
    """A start of the script ended by itself with ``status``, never 0, and said ``text``."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


class Starts:
    """Starts of the script with the same flags, one after the other."""

    def __init__(self, flags: dict[str, str], folder: Path, temporary: Path) -> None:
        """
        Args:
            flags: of the script, without ``output_dir``.
            folder: for the logs.
            temporary: the ``TMPDIR`` of all processes, by which they are found.
        """
        self.flags, self.folder, self.temporary = flags, folder, temporary
        self.titles: list[str] = []  # those said so far

    def run(self, title: str, output_dir: Path, until: Callable[[], bool] | None = None) -> bool:
        """Start the script and wait for its end, or kill all its processes as soon as ``until`` is true.

        Returns:
            Whether it was killed.

        Raises:
            RunFailed: it ended by itself with another status than 0.
        """
        if title not in self.titles:
            self.titles.append(title)
            show(f"{len(self.titles)} of 3: {title}")
        words = [f"--{name}={value}" for name, value in {**self.flags, "output_dir": str(output_dir)}.items()]
        log = self.folder / f"{len(self.titles)}.log"
        began = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to answer
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )
        num_shown = 0
        while True:
            status = process.poll()
            is_due = status is None and until is not None and until()
            if is_due:
                break
            num_shown = _show_new_lines(log, num_shown)
            if status is not None:
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
        kill_all(self.temporary)
        process.wait()
        _show_new_lines(log, num_shown)
        if status:
            raise _failure(len(self.titles), status, log.read_text(encoding="utf-8", errors="replace"))
        show(f"    {'killed' if is_due else 'done'} after {time.monotonic() - began:.0f} s")
        return is_due


def _show_new_lines(log: Path, start: int) -> int:
    """Show what the script said of its steps from byte ``start`` on. Returns where the next line begins."""
    if log.stat().st_size == start:
        return start
    with log.open("rb") as file:
        file.seek(start)
        text = file.read()
    text = text[: text.rfind(b"\n") + 1]
    for line in text.decode(errors="replace").splitlines():
        if line.startswith(("step ", "evaluation after ", "continuing after ", "skipping ")):
            show(f"    {line}")
    return start + len(text)


def _failure(number: int, status: int, text: str) -> RunFailed:
    """What the script itself said: a launcher turns its status 2 into 1, and talks around the one block that counts."""
    block = re.search(r"^error: (rank \d)?.*(\n[ \t]+\S.*)*", text, re.MULTILINE)
    if block:
        return RunFailed(max(status, 1) if block[1] else 2, block[0])
    crash = re.search(r"^rank \d+ failed:", text, re.MULTILINE)
    lines = text[crash.start() :].splitlines()[:60] if crash else text.splitlines()[-60:]
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return RunFailed(max(status, 1), "\n".join([*lines, f"error: run {number} of 3 {how}"]))


@contextmanager
def workplace() -> Iterator[Path]:
    """A temporary folder; at the end it goes, and with it every process that has it as its ``TMPDIR``.

    SIGTERM and a lost terminal do what Ctrl-C does.
    """
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # `nohup` and background jobs have some of them ignored.
    handlers = {number: old for number in asking if (old := signal.getsignal(number)) != signal.SIG_IGN}

    def leave(number: int, frame: Any) -> NoReturn:
        for each in handlers:  # asking twice must not leave half of it
            signal.signal(each, signal.SIG_IGN)
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
    """SIGKILL to every process that was started with this ``TMPDIR``; returns when they are gone.

    Launchers put ranks in sessions of their own, and ranks that lost their launcher have no parent to be found by:
    what all of them share is their environment.
    """
    stopped: set[psutil.Process] = set()
    while found := _processes(temporary) - stopped:  # one that stands still starts no other, and saves nothing
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
