"""One run per folder: a lock that the kernel holds for as long as the process lives, and a note on who holds it.

Promises: the lock ends with its process, however that ends; the note tells an orderly end from a kill, and restarted
ranks what was done before them.
"""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit.errors import Problem, UserError

NAME = ".lock"  # in an output_dir
_SECONDS = 1.0  # another start that only looks whether the folder is free holds it for less
_held: dict[Path, Any] = {}  # open until this process ends


def take(folder: Path) -> list[str]:
    """Lock ``folder`` until this process ends.

    Returns:
        What the user should know: who had it and was killed, or that this disk knows no locks.

    Raises:
        UserError: another process has it.
    """
    if folder.resolve() in _held:
        return []
    # No link is followed: what is written here would be written to somebody's file.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    file = os.fdopen(os.open(folder / NAME, flags, 0o666), "a+", encoding="utf-8")
    notes = []
    end = time.monotonic() + _SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise _in_use(folder) from None
            time.sleep(0.05)
        except OSError as error:
            notes.append(f"warning: {folder} cannot be locked ({error.strerror}): do not start a second run in it")
            break
    last = read(folder)
    if not notes and last and not last.get("ended"):
        notes.append(f"{_owner(last)} had this output_dir and was killed: taking over")
    _held[folder.resolve()] = file
    return notes


def sign(folder: Path, emptied: bool) -> None:
    """Say who holds the lock now; ``emptied``: and that what was in the folder before is gone."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "at": time.time(), "emptied": emptied}
    _write(folder.resolve(), about)


def sign_off() -> None:
    """Say of all locks held that this process comes to an end of its own."""
    for folder in _held:
        with suppress(OSError):  # a full disk
            _write(folder, {**read(folder), "ended": True})


def look(folder: Path) -> None:
    """Raise ``UserError`` if a run is at work in ``folder``; shared, so that the ranks of a run may look together."""
    if folder.resolve() in _held or not (folder / NAME).is_file():
        return
    try:
        file = (folder / NAME).open(encoding="utf-8")
    except OSError as error:
        found = f"{folder / NAME} cannot be read ({error.strerror})"
        raise UserError(Problem("output_dir", found, fix="choose another --output_dir")) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder) from None
        except OSError:
            return  # a disk without locks: said when the run starts


def read(folder: Path) -> dict[str, Any]:
    """What was signed last, with ``at`` in seconds since the epoch; empty if nothing that can be read."""
    if not (folder / NAME).is_file():
        return {}
    try:
        about = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return {**about, "at": float(about["at"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _write(folder: Path, about: dict[str, Any]) -> None:
    file = _held[folder]
    file.truncate(0)
    file.write(json.dumps(about) + "\n")
    file.flush()


def _in_use(folder: Path) -> UserError:
    found = f"{folder} is in use by {_owner(read(folder))}"
    return UserError(Problem("output_dir", found, fix="wait for it, end it, or choose another --output_dir"))


def _owner(about: dict[str, Any]) -> str:
    if not {"pid", "host", "since"} <= about.keys():
        return "another run"
    return f"process {about['pid']} on {about['host']} (since {about['since']})"


def _let_go() -> None:
    """In a forked child, which may outlive its parent."""
    for file in _held.values():
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
