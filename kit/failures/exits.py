"""How a script ends: with one error message on standard error and a defined exit status.

Promises: the exit status is 2 for a mistake that the user can fix, 1 for a failure, 75 for a stop by signal, 130 for
Ctrl-C. If all ranks fail alike, only one prints. Functions registered with ``finish_first`` are called before the
script ends, unless it is killed. An error is repeated in the folder of the run.
"""

import errno
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from kit import durable, interrupt
from kit.console import guard_libraries, is_main, rank, show_error
from kit.errors import Problem, TrainingError, UserError, first_line
from kit.secrets import redacted
from kit.strategy.failure_note import FailedElsewhere, forget_machines, report_to_others
from kit.strategy.launcher import end_launcher_later, leads_other_machine, record_exit
from kit.visible import one_line, visible

ERROR_FILE = "error.txt"  # in an output_dir, until the run continues
STOPPED = 75  # stopped by a signal after saving; EX_TEMPFAIL of sysexits.h: run the same command again
_FINAL = (UserError.exit_status, STOPPED)  # restarted ranks would end with the same status
_BEGAN = time.monotonic()
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Run the ``with`` block of a script, and end the process with the exit status that fits how the block ended.

    If the block raises, print one error message to standard error, without credentials.
    """
    _run_folders.clear()
    _reason.clear()
    forget_machines()
    guard_libraries()
    _is_ending.clear()
    try:
        yield
        if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
            sys.modules["torch"].distributed.destroy_process_group()
            leave(0)  # a thread of the process group may still run, and would make the interpreter's shutdown abort
        _finish()
    except KeyboardInterrupt:
        interrupt.report("stopped by Ctrl-C; the same command starts again")
        _reason[:] = ["Ctrl-C ended it"]
        leave(interrupt.STATUS)
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as caught:  # libraries in Rust raise one that is no Exception
        _is_ending.set()
        interrupt.raise_on_ctrl_c()
        error: BaseException = caught
        for explain in _explainers:
            if not isinstance(error, UserError | TrainingError):
                with suppress(Exception):  # if explaining fails, the original error is printed
                    error = explain(error) or error
        if isinstance(error, UserError | TrainingError):
            text = str(error) if isinstance(error, UserError) else f"error: rank {rank()}: {error}"
            status, reason = error.exit_status, "" if isinstance(error, FailedElsewhere) else text
            if not is_main() and not leads_other_machine():
                report_to_others(status, visible(redacted(reason)))
                # A launcher ends all ranks when one exits. So wait for rank 0, which usually has the same error, and
                # print it here only if rank 0 did not. On other machines, their first rank prints too.
                _finish()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(10)
        else:
            text = f"rank {rank()} failed:\n{''.join(traceback.format_exception(caught))}"
            reason = f"{type(caught).__name__}: {first_line(caught)}\n    -> the traceback is in its own output"
            status = 1
        text = visible(redacted(text))
        show_error(f"\n{text}{_written_to_run_folder(text)}")
        _reason[:] = [visible(redacted(reason))]
        # Before the others know: when rank 0 has left, the launcher here loses the store, and looks for this.
        record_exit(status, is_final=status in _FINAL, text=_reason[0])
        report_to_others(status, _reason[0])
        leave(status)  # the interpreter's shutdown would wait for threads that wait for other ranks


def leave(status: int) -> NoReturn:
    """End the process with exit status ``status``, without waiting for other ranks."""
    _finish()
    record_exit(status, is_final=status in _FINAL, text="".join(_reason))
    if status not in (0, STOPPED):
        end_launcher_later()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)  # interpreter shutdown would wait for threads in a collective


def is_ending() -> bool:
    """Return whether the script has failed, and is about to report it and to end."""
    return _is_ending.is_set()


def finish_first(finish: Callable[[], None]) -> None:
    """Register ``finish`` to be called before the script ends, with any exit status; the last registered goes first."""
    _unfinished.append(finish)


def repeat_errors_in(folder: Path) -> None:
    """Register the ``output_dir`` of this run: an error is also written there, if the folder exists by then.

    A launcher may print so much after the error that the user does not find it.
    """
    _run_folders[:] = [folder]


def _written_to_run_folder(text: str) -> str:
    """Write ``text`` to ``ERROR_FILE``, and return a line that says so; empty if there is no folder of this run."""
    for folder in _run_folders:
        with suppress(OSError):
            if folder.is_dir():
                path, new = folder / ERROR_FILE, folder / f".{ERROR_FILE}.{rank()}.partial"
                lines = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n"
                with durable.create(new) as file:
                    file.write(lines.encode())
                # What another rank of this start wrote stays; what an earlier start wrote does not. Both times are of
                # the disk's clock, which may differ from that of this machine.
                is_file = path.exists() and not path.is_symlink()
                age = new.stat().st_mtime - path.stat().st_mtime if is_file else math.inf
                if age < time.monotonic() - _BEGAN:
                    new.unlink()
                    with durable.open_to_append(path) as log:
                        log.write(lines)
                else:
                    new.replace(path)
                return f"\n(this message is also in {one_line(str(path))})"
    return ""


def explain_with(explain: Callable[[BaseException], Exception | None]) -> None:
    """Register ``explain``, which turns an unexpected exception into a ``UserError`` or ``TrainingError``, or None.

    The function registered last is asked first.
    """
    _explainers.insert(0, explain)


def _explain_disk(error: BaseException) -> UserError | None:
    """Explain a full or read-only disk, which the user can fix."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return None
    return UserError(Problem(str(error.filename or "disk"), str(error.strerror), fix="make room, and run it again"))


_explainers: list[Callable[[BaseException], Exception | None]] = [_explain_disk]
_unfinished: list[Callable[[], None]] = []
_run_folders: list[Path] = []  # none or one
_reason: list[str] = []  # the error with which the script ends: none or one
_is_ending = threading.Event()


def _finish() -> None:
    while _unfinished:
        _unfinished.pop()()
