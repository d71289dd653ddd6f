"""All output of the kit: lines, progress bars, the output of commands, errors, and messages of libraries.

Promises: no other module prints. In a run only the main process prints, except errors. Output holds no credential, and
no character that a terminal would act on (``visible.py``). A closed terminal or pipe does not end a run. Long work is
reported every ``QUIET_SECONDS``, in a log file too. Imports only plain Python and tqdm, so it can be used before
anything slow is imported.
"""

import argparse
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NoReturn, TextIO

from tqdm import tqdm

from kit.system.credentials import redacted
from kit.system.visible import one_line, visible

QUIET_SECONDS = 30.0
_work = ("", "", 0.0)  # the current work of this process, its progress, and its start
_last_line = 0.0  # when the last line was printed

# Messages of libraries that no user can act on: deprecations, and remarks on choices of the kit.
_SILENCED_MESSAGES = (
    ".*gradient_checkpointing.*deprecated.*",
    ".*torch.distributed is disabled, unavailable or uninitialized.*",
    ".*Please use DTensor instead.*",
    ".*FSDP.state_dict_type.*",
    ".*TypedStorage is deprecated.*",
)
_SILENCED_LOGGERS = (
    "bitsandbytes",
    "torch._higher_order_ops.wrap",  # that layers which keep some results are compiled
    "torch.distributed.device_mesh",  # that a mesh which another rank sent has no process groups here
    "torch.distributed.elastic",
    "torch.distributed.fsdp._state_dict_utils",
    "torch.utils._pytree",  # of torchao, when transformers imports it
    "torchao",  # which of its kernels it cannot load: none is used
)


def rank() -> int:
    """Return the global rank that the launcher gave this process; 0 without a launcher.

    It is known before the process group exists.
    """
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Return whether this process is the main process (rank 0), the only one that prints and writes."""
    return rank() == 0


def say(*lines: str) -> None:
    """Print lines from the main process, without breaking a progress bar.

    A line break in a line is shown as ``\\n``, unless the line is a ``Layout``.
    """
    global _last_line
    if lines and is_main():
        _last_line = time.monotonic()
        with ignoring_closed_output():
            for line in lines:
                tqdm.write(_printable(one_line(line), sys.stdout), file=sys.stdout)
            sys.stdout.flush()


def announce_wait(what: str) -> None:
    """Announce work of some seconds on a terminal. If standard error is redirected, print nothing."""
    begin_work(what)
    if sys.stderr.isatty():
        show_error(one_line(f"{what} ..."))


def begin_work(what: str, done: str = "") -> None:
    """Note the current work of this process, and its progress; an empty string for none that takes time."""
    global _work
    _work = (what, done, _work[2] if what == _work[0] else time.monotonic())


def report_long_work() -> threading.Event:
    """Print the work of the main process to standard error, whenever it printed nothing for a while.

    Returns an event that ends that when it is set.
    """
    is_over = threading.Event()
    if is_main():
        threading.Thread(target=_report_long_work, args=(is_over,), daemon=True).start()
    return is_over


def _report_long_work(is_over: threading.Event) -> None:
    global _last_line
    while not is_over.wait(QUIET_SECONDS / 30):
        what, done, since = _work
        now = time.monotonic()
        # A progress bar on the terminal says more.
        if what and now - max(since, _last_line) > QUIET_SECONDS and not getattr(tqdm, "_instances", ()):
            _last_line = now
            show_error(one_line(f"{what}{done}, {now - since:.0f} s so far"))


def show(text: str, has_colours: bool = False, end: str = "\n") -> None:
    """Print the output of a command. If the reader has closed the pipe, as ``head`` does, the output is discarded.

    Args:
        has_colours: ``text`` holds colours of the kit's own, so whoever made it has made all else visible.
        end: what follows ``text``; empty if more of the line is printed later.
    """
    try:
        print(_printable(text if has_colours else visible(text), sys.stdout), end=end, flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more at exit, which would fail again.
        _discard_output()


def show_error(text: str) -> None:
    """Print to standard error, from any process. If it is closed, print nothing."""
    with suppress(OSError):
        print(_printable(visible(text), sys.stderr), file=sys.stderr, flush=True)


def _printable(text: str, stream: TextIO) -> str:
    """``text`` without credentials, and with ``?`` for what the encoding of ``stream`` lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return redacted(text).encode(encoding, "replace").decode(encoding)


@contextmanager
def ignoring_closed_output() -> Iterator[None]:
    """Ignore a failed write to standard output, and discard what is printed from then on.

    A closed terminal, or a `tee` that the same Ctrl-C ended, must not stop a run.
    """
    try:
        yield
    except OSError:
        with suppress(OSError):
            _discard_output()


def _discard_output() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


# Wraps an iterable in a progress bar; takes the iterable, a name and the number of items.
Progress = Callable[[Iterable[Any], str, int | None], Iterable[Any]]


def progress(items: Iterable[Any], name: str, total: int | None) -> Iterator[Any]:
    """Return ``items`` with a progress bar, shown by the main process if standard error is a terminal.

    Args:
        name: the text next to the bar.
        total: the number of items; None if it is not known.
    """
    visible_here = is_main() and sys.stderr.isatty()
    bar = tqdm(items, desc=one_line(name), total=total, leave=False, dynamic_ncols=True, disable=not visible_here)
    for done, item in enumerate(bar):
        begin_work(name, f": {done} of {total}" if total else "")
        yield item


def bar(name: str, unit: str, total: int | None, done: int = 0, scales: bool = False) -> Any:
    """Return a progress bar of this process, shown if standard error is a terminal.

    Args:
        name: the text next to the bar.
        unit: of what is counted.
        total: the number of units; None: unknown.
        done: units that are done already.
        scales: whether large numbers are shown as ``1.2M``.
    """
    begin_work(name)
    return tqdm(
        desc=one_line(name) or None,
        unit=one_line(unit),
        unit_scale=scales,
        initial=done,
        total=total,
        dynamic_ncols=True,
        disable=not sys.stderr.isatty(),
    )


class Parser(argparse.ArgumentParser):
    """A parser whose messages quote the command without characters that a terminal would act on."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and ``message``, and end the process with status 2."""
        super().error(_printable(one_line(message), sys.stderr))


@cache
def guard_libraries() -> None:
    """From now on, print warnings and logs of libraries like the kit's own lines: visible, without credentials."""
    format_warning, make_record = warnings.formatwarning, logging.getLogRecordFactory()

    def formatted(*args: Any, **kwargs: Any) -> str:
        return visible(redacted(format_warning(*args, **kwargs)))

    def made(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        with suppress(Exception):  # a record whose arguments do not fit is reported by its handler
            record.msg, record.args = visible(redacted(record.getMessage())), ()
        return record

    warnings.formatwarning = formatted
    logging.setLogRecordFactory(made)
    _silence_loggers()  # for messages of imports


def _silence_loggers() -> None:
    for name in _SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def silence_libraries() -> None:
    """Hide the warnings of libraries that no user can act on. Call it before a model is opened."""
    import transformers

    for message in _SILENCED_MESSAGES:
        warnings.filterwarnings("ignore", message=message)
    _silence_loggers()  # again: torch, when it is imported, sets the levels of some
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
