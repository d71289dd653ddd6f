"""Ctrl-C before any work has started, while libraries are imported, ends the process at once.

Python's own ``KeyboardInterrupt`` would not: some imports of libraries ignore it, so that the run starts all the same,
and others turn it into an error of their own. Plain Python, imported before everything else.

Until then no garbage is collected: imports make hundreds of thousands of objects, which stay, and looking through them
again and again takes a fifth of the imports' time.
"""

import gc
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

STATUS = 130  # 128 + SIGINT
# Signals that stop a run: of a scheduler, Ctrl-C, Slurm's warning, a closed terminal. Not every system has all.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
# Environment variable of ranks that kit.strategy.launch.torchrun_main started: the file for their exit status.
OWN_TORCHRUN = "KIT_TORCHRUN"


class Stopped(Exception):
    """Ends an evaluation or a rollout early, on all ranks at the same place."""


def leave_on_ctrl_c() -> None:
    """Let Ctrl-C end this process at once, and collect no garbage. Call it before any work that needs a clean-up."""
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the command ignores it, as `nohup` may
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_ctrl_c() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again, so that work is cleaned up. Call it after the imports."""
    end_imports()
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_imports() -> None:
    """Collect garbage again if ``leave_on_ctrl_c`` ended that; what the imports made is never looked through."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def become(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a Python program."""
    sys.stdout.flush()
    os.execve(sys.executable, command, env)


def report(line: str) -> None:
    """Print ``line`` to standard error, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the terminal is closed. Not `print`: the signal may have interrupted one
            os.write(2, f"\n{line}\n".encode())
