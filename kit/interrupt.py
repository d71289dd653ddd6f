"""Ctrl-C before anything was begun: one line, and exit status 130.

Promises: from ``leave_on_ctrl_c`` until ``raise_on_ctrl_c``, Ctrl-C ends the process at once. Python's own
``KeyboardInterrupt`` would not: some imports of libraries ignore it, so that the run starts all the same, and others
turn it into an error of their own. Of several ranks one line is printed.

Plain Python, imported before everything else.
"""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

STATUS = 130  # 128 + SIGINT
# What asks a run to stop: a scheduler, Ctrl-C, Slurm's warning, a closed terminal. Not every system has all of them.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
# Environment variable of ranks that kit.strategy.torchrun started: it asks how they ended, and reports it.
OWN_TORCHRUN = "KIT_TORCHRUN"
BEFORE = "stopped by Ctrl-C before anything was begun"


_pid = os.getpid()
# Whether another process prints for this one. Of the ranks of other launchers rank 0 prints.
_is_silent = OWN_TORCHRUN in os.environ or os.environ.get("RANK", "0") != "0"


def leave_on_ctrl_c() -> None:
    """Let Ctrl-C end this process at once. Call it first, where nothing has been begun that must be ended."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the command ignores it, as `nohup` may
        signal.signal(signal.SIGINT, _leave)
    _hold(False)


def become(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a Python program, which begins with ``leave_on_ctrl_c``. Until then Ctrl-C waits.

    Else it would end Python while that starts, with a traceback.
    """
    sys.stdout.flush()
    _hold(True)
    try:
        os.execve(sys.executable, command, env)
    finally:  # it failed
        _hold(False)


def _hold(is_held: bool) -> None:
    """Let Ctrl-C wait, also for a program that takes the place of this one; or no longer."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK if is_held else signal.SIG_UNBLOCK, {signal.SIGINT})


def raise_on_ctrl_c() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again, so that what has been begun is ended in order."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def report(line: str) -> None:
    """Print ``line`` to standard error, unless this is a rank for which another process prints it."""
    if not _is_silent:
        with suppress(OSError):  # the terminal is closed. Not `print`: the signal may have interrupted one
            os.write(2, f"\n{line}\n".encode())


def _leave(number: int, frame: Any) -> None:
    if os.getpid() == _pid:  # else it is a fork, and gets the same Ctrl-C
        report(BEFORE)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(STATUS)
