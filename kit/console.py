"""What a person reads while a command runs: lines and progress bars, from one process of a run.

Promises: only the main process speaks; no line holds a credential; a reader who went away ends nothing.
Plain Python and tqdm: usable before anything heavy is imported.
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

# Third-party messages no user can act on: deprecations between libraries, and remarks on what the kit does on purpose.
_SILENCED_MESSAGES = (
    ".*is_gradient_checkpointing.*deprecated.*",
    ".*torch.distributed is disabled, unavailable or uninitialized.*",
    ".*Please use DTensor instead.*",
    ".*FSDP.state_dict_type.*",
    ".*TypedStorage is deprecated.*",
)
_SILENCED_LOGGERS = ("bitsandbytes", "torch.distributed.fsdp._state_dict_utils", "torch.distributed.elastic")


def rank() -> int:
    """The global rank of this process as its launcher set it, 0 without one; known before the process group exists."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank() == 0


def say(*lines: str) -> None:
    """Print lines from the main process, without breaking a progress bar."""
    if lines and is_main():
        with unheard():
            for line in lines:
                tqdm.write(redacted(line), file=sys.stdout)
            sys.stdout.flush()


def show(text: str) -> None:
    """Print the output of a command, and take it calmly when the reader has gone, as ``head`` does."""
    try:
        # Data may hold what a terminal's encoding cannot.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(redacted(text).encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more at exit.
        _discard_output()


@contextmanager
def unheard() -> Iterator[None]:
    """Go on when standard output is gone: a closed terminal, or a `tee` that the same Ctrl-C ended, stops no run."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            _discard_output()


def _discard_output() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def progress(items: Iterable[Any], name: str, total: int) -> Iterable[Any]:
    """``items`` with a progress bar, on the main process and where standard error is a terminal."""
    visible = is_main() and sys.stderr.isatty()
    return tqdm(items, desc=name, total=total, leave=False, dynamic_ncols=True, disable=not visible)


def silence_libraries() -> None:
    """Hide the warnings of libraries that no user can act on. Call it before models are touched."""
    import transformers

    for message in _SILENCED_MESSAGES:
        warnings.filterwarnings("ignore", message=message)
    for name in _SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
