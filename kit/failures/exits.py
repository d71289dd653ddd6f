"""How a script ends: one error message on standard error, and a defined exit status.

Promises: the exit status is 2 for a mistake that the user can fix, 1 for a failure, 75 for a stop by signal, 130 for
Ctrl-C. If all ranks fail alike, only one prints. Functions registered with ``finish_first`` are called before the
script ends, unless it is killed. An error is repeated in the folder of the run.
"""

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from kit.strategy.processes.launcher import leads_other_machine, record_exit
from kit.system import durable, interrupt
from kit.system.console import guard_libraries, is_main, rank, report_long_work, show_error
from kit.system.credentials import redacted
from kit.system.errors import TrainingError, UserError
from kit.system.visible import one_line, visible

ERROR_FILE = "error.txt"  # in an output_dir, until the run continues
STOPPED = 75  # stopped by a signal after saving; EX_TEMPFAIL of sysexits.h: run the same command again
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Run the ``with`` block of a script, and end the process with the exit status that fits how the block ended.

    If the block raises, print one error message to standard error, without credentials.
    """
    _run_folders.clear()
    guard_libraries()
    is_over = report_long_work()
    try:
        yield
        if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
            sys.modules["torch"].distributed.destroy_process_group()
            leave(0)  # a thread of the process group may still run, and would make the interpreter's shutdown abort
        _finish()
    except KeyboardInterrupt:
        interrupt.report("stopped by Ctrl-C; type the same command to start again")
        leave(interrupt.STATUS)
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as caught:  # libraries in Rust raise one that is no Exception
        interrupt.raise_on_ctrl_c()
        error: BaseException = caught
        for explain in _explainers:
            if not isinstance(error, UserError | TrainingError):
                with suppress(Exception):  # if explaining fails, the original error is printed
                    error = explain(error) or error
        if isinstance(error, UserError | TrainingError):
            text = str(error) if isinstance(error, UserError) else f"error: rank {rank()}: {error}"
            status = error.exit_status
            if not is_main() and not leads_other_machine():
                # A launcher ends all ranks when one exits. So wait for rank 0, which usually has the same error, and
                # print it here only if rank 0 did not. On other machines, their first rank prints too.
                _finish()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(10)
        else:
            text = f"rank {rank()} failed:\n{''.join(traceback.format_exception(caught))}"
            status = 1
        text = visible(redacted(text))
        show_error(f"\n{text}{_written_to_run_folder(text)}")
        leave(status)  # the interpreter's shutdown would wait for threads that wait for other ranks
    finally:
        is_over.set()


def leave(status: int) -> NoReturn:
    """End the process with exit status ``status``, without waiting for other ranks."""
    _finish()
    record_exit(status)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)  # interpreter shutdown would wait for threads in a collective


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
        path = folder / ERROR_FILE
        with suppress(OSError):
            if folder.is_dir():
                durable.write_text(path, f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")
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
    return UserError(
        str(error.filename or "disk"), str(error.strerror), fix="free disk space, and type the same command again"
    )


_explainers: list[Callable[[BaseException], Exception | None]] = [_explain_disk]
_unfinished: list[Callable[[], None]] = []
_run_folders: list[Path] = []  # none or one


def _finish() -> None:
    while _unfinished:
        _unfinished.pop()()
