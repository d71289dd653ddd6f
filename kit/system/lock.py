"""The lock of an output folder: only one run at a time may use it.

The kernel releases the lock when the process ends, however it ends. The lock file also holds a signature: which process
holds the lock, or held it last.
"""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from kit.system.durable import read_object
from kit.system.errors import UserError

NAME = ".lock"  # in an output_dir
ANOTHER = "another --output_dir"  # what to type if a folder cannot be used
_WAIT_SECONDS = 1.0  # for the lock: ``check_free`` of another process holds it for less
_held: dict[Path, Any] = {}  # the open lock file of each locked folder; stays open until this process ends


def acquire(folder: Path) -> list[str]:
    """Lock ``folder`` until this process ends.

    Returns:
        A note for the user if this disk does not support locks.

    Raises:
        UserError: another process holds the lock.
    """
    if folder.resolve() in _held:
        return []
    # O_NOFOLLOW: through a link, the signature would overwrite a file elsewhere.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    file = os.fdopen(os.open(folder / NAME, flags, 0o666), "a+", encoding="utf-8")
    notes = []
    end = time.monotonic() + _WAIT_SECONDS
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
    _held[folder.resolve()] = file
    return notes


def sign(folder: Path) -> None:
    """Write the signature of this process into the lock file of a folder that it has locked."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file = _held[folder.resolve()]
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n")
    file.flush()


def check_free(folder: Path) -> None:
    """Raise ``UserError`` if a run holds the lock of ``folder``. All ranks of a run may call this at the same time."""
    if folder.resolve() in _held or not (folder / NAME).is_file():
        return
    try:
        file = (folder / NAME).open(encoding="utf-8")
    except OSError as error:
        found = f"{folder / NAME} cannot be read ({error.strerror})"
        raise UserError("output_dir", found, fix=ANOTHER) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder) from None
        except OSError:
            return  # a disk without locks: ``acquire`` warns about it


def read(folder: Path) -> dict[str, Any]:
    """Return the last signature; empty if there is none or it is damaged."""
    return read_object(folder / NAME)


def _in_use(folder: Path) -> UserError:
    signature, owner = read(folder), "another run"
    if {"pid", "host", "since"} <= signature.keys():
        owner = f"process {signature['pid']} on {signature['host']} (since {signature['since']})"
    found = f"{folder} is in use by {owner}"
    return UserError("output_dir", found, fix=f"{ANOTHER}; or wait for it, or end it")


def _close_in_child() -> None:
    """Close the lock files in a forked child: the child would keep the locks after its parent has ended."""
    for file in _held.values():
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
