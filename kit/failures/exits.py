"""How a script ends: one block on standard error, the exit status of the contract, and nothing half done.

Promises: status 2 for what the user can mend, 1 for a failure, 75 for a stop by signal, 130 for Ctrl-C; of several
ranks one speaks; what was asked to ``finish_first`` is done however the script leaves, unless it is killed.
"""

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from kit.console import is_main, rank
from kit.errors import Problem, TrainingError, UserError
from kit.secrets import redacted
from kit.strategy.launcher import remember_end

STOPPED = 75  # by a signal, and saved; EX_TEMPFAIL: run the same command again
_FINAL = (UserError.exit_status, STOPPED)  # another start of the same ranks would end so too
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn what goes wrong into one block on standard error and the exit status of the contract."""
    try:
        yield
        if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
            sys.modules["torch"].distributed.destroy_process_group()
            leave(0)  # a thread of the group still winding down would abort the interpreter's own shutdown
        _finish()
    except KeyboardInterrupt:
        leave(130)
    except Exception as caught:
        error = caught
        for explain in _explainers:
            if not isinstance(error, UserError | TrainingError):
                with suppress(Exception):  # what cannot be explained is told as it is
                    error = explain(error) or error
        if isinstance(error, UserError | TrainingError):
            text = str(error) if isinstance(error, UserError) else f"error: rank {rank()}: {error}"
            status = error.exit_status
            if not is_main():
                # Launchers end every rank when one exits: wait for rank 0 to say the same, and speak if it does not.
                _finish()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(10)
        else:
            text = f"rank {rank()} failed:\n{''.join(traceback.format_exception(caught))}"
            status = 1
        with suppress(OSError):  # nobody reads it
            print(f"\n{redacted(text)}", file=sys.stderr, flush=True)
        leave(status)  # the interpreter's own shutdown would wait for threads that wait for other ranks


def leave(status: int) -> NoReturn:
    """Exit with ``status``, without waiting for other ranks."""
    _finish()
    if status in _FINAL:
        remember_end(status)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)  # interpreter shutdown would wait for threads in a collective


def finish_first(finish: Callable[[], None]) -> None:
    """Call ``finish`` before the script leaves, with whatever status; the last one asked for is the first."""
    _unfinished.append(finish)


def explain_with(explain: Callable[[Exception], Exception | None]) -> None:
    """Ask ``explain``, before those known already, what an unexpected exception means: a ``UserError``, a
    ``TrainingError``, or None."""
    _explainers.insert(0, explain)


def _explain_disk(error: Exception) -> UserError | None:
    """A disk that takes no more is the user's to mend."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return None
    return UserError(Problem(str(error.filename or "disk"), str(error.strerror), fix="make room, and run it again"))


_explainers: list[Callable[[Exception], Exception | None]] = [_explain_disk]
_unfinished: list[Callable[[], None]] = []


def _finish() -> None:
    while _unfinished:
        _unfinished.pop()()
