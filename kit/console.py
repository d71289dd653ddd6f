"""Lines and progress bars for the user of a running command, printed by the main process only.

Promises: only the main process prints; no line holds a credential; a closed terminal or pipe does not end a run.
Imports only plain Python and tqdm, so it can be used before anything slow is imported.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

from kit.secrets import redacted

# Messages of libraries that no user can act on: deprecations, and remarks on what the kit does on purpose.
_SILENCED_MESSAGES = (
    ".*is_gradient_checkpointing.*deprecated.*",
    ".*torch.distributed is disabled, unavailable or uninitialized.*",
    ".*Please use DTensor instead.*",
    ".*FSDP.state_dict_type.*",
    ".*TypedStorage is deprecated.*",
)
_SILENCED_LOGGERS = ("bitsandbytes", "torch.distributed.fsdp._state_dict_utils", "torch.distributed.elastic")


def rank() -> int:
    """Return the global rank that the launcher gave this process; 0 without a launcher.

    It is known before the process group exists.
    """
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Return whether this process is the main process (rank 0), the only one that prints and writes."""
    return rank() == 0


def say(*lines: str) -> None:
    """Print lines from the main process, without breaking a progress bar."""
    if lines and is_main():
        with ignoring_closed_output():
            for line in lines:
                tqdm.write(redacted(line), file=sys.stdout)
            sys.stdout.flush()


def announce_wait(what: str) -> None:
    """Print on a terminal what takes some seconds now. If standard error is redirected, print nothing."""
    if sys.stderr.isatty():
        print(redacted(f"{what} ..."), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print the output of a command. If the reader has closed the pipe, as ``head`` does, the output is discarded."""
    try:
        # The data may hold characters that the terminal's encoding lacks.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(redacted(text).encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more at exit, which would fail again.
        _discard_output()


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


def progress(items: Iterable[Any], name: str, total: int) -> Iterable[Any]:
    """Return ``items`` with a progress bar, shown by the main process if standard error is a terminal.

    Args:
        name: the text beside the bar.
        total: the number of items.
    """
    visible = is_main() and sys.stderr.isatty()
    return tqdm(items, desc=name, total=total, leave=False, dynamic_ncols=True, disable=not visible)


def silence_libraries() -> None:
    """Hide the warnings of libraries that no user can act on. Call it before a model is opened."""
    import transformers

    for message in _SILENCED_MESSAGES:
        warnings.filterwarnings("ignore", message=message)
    for name in _SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
