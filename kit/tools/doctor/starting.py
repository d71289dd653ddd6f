"""Start the ranks on this machine through the kit's launcher, and take their results while they come.

Promises: this process never waits longer than ``hard_limit`` after the launcher's start; no process is left behind.
"""

import json
import queue
import re
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from kit.strategy.torchrun import torchrun_command
from kit.tools.doctor.ranks import NO_ANSWER_FIX
from kit.tools.doctor.result import Report, Result

# From the launcher's start until ranks have imported torch: 10 s for two of them on two slow cores.
START_SECONDS = 120
_SHUTDOWN_SECONDS = 2  # for ranks after the launcher's SIGTERM


def hard_limit(timeout_seconds: float) -> float:
    """Return the seconds after which the ranks are killed whatever happens: to join, to answer, and a minute."""
    return 2 * timeout_seconds + 60


def start_ranks(report: Report, words: list[str], num_processes: int, timeout_seconds: float, own_config: bool) -> None:
    """Start the ranks, and add their results to ``report``.

    Args:
        words: the flags of the recipe, for each rank.
        own_config: whether ``--config`` gives the topology, not what `accelerate launch` left in the environment.
    """
    script = [str(Path(__file__).with_name("ranks.py")), str(timeout_seconds), *words]
    command, env = torchrun_command(script, num_processes, _SHUTDOWN_SECONDS, keep_environment=not own_config)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            _follow(report, process.stdout, time.monotonic() + START_SECONDS + hard_limit(timeout_seconds))
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SHUTDOWN_SECONDS)
            status = process.poll()
        finally:
            _kill(process)
        if status and report.status != "fail":
            errors.seek(0)
            report.add(Result("ranks", "fail", _last_words(errors.read(), status), NO_ANSWER_FIX))


def _follow(report: Report, stdout: IO[str], end: float) -> None:
    """Add results until all ranks have closed ``stdout``, or one did not answer, or time is up."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            report.add(Result("ranks", "fail", "no result from any rank", NO_ANSWER_FIX))
            return
        if line is None:
            return
        with suppress(ValueError, TypeError):  # what libraries print
            result = Result(**json.loads(line))
            report.add(result)
            if result.fix == NO_ANSWER_FIX:
                return  # other ranks would say the same


def _last_words(text: str, status: int) -> str:
    """The error message of a rank that ended without a result, or the last line that is not empty."""
    found = re.search(r"^error: .*", text, re.MULTILINE)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"ended with status {status}: {found[0] if found else lines[-1] if lines else 'without a word'}"


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the launcher and its ranks, stopped ones too."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        for child in [*launcher.children(recursive=True), launcher]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()
