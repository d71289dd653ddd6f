"""What there is to know of an ``output_dir`` before a run has one.

Promises: nothing is written. (Where only a try tells whether a folder can be made, one is made and removed at once.)
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit import lock
from kit.checkpoint.manifest import list_checkpoints
from kit.errors import Problem, UserError
from kit.run.identity import differences
from kit.run.record import RUN_FILE

_ANOTHER = "choose another --output_dir"


def check_writable(folder: Path) -> None:
    """Raise ``UserError`` if ``folder`` is no folder, or cannot be made or written to."""
    try:
        parent = next(path for path in [folder, *folder.resolve().parents] if path.exists())
        if not parent.is_dir():
            raise UserError(Problem("output_dir", f"{parent} is a file", "a folder"))
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(Problem("output_dir", f"{parent} cannot be written to", fix=_ANOTHER))
        # To root every folder seems writable, also in /proc and /sys. These have no blocks; so do a few real disks.
        if os.statvfs(parent).f_blocks == 0:
            os.rmdir(tempfile.mkdtemp(prefix=".", dir=parent))
    except OSError as error:
        found = f"{folder}: {error.strerror or error}"
        raise UserError(Problem("output_dir", found, "a folder to write to", _ANOTHER)) from None


def unfinished_elsewhere(folder: Path, recipe_name: str, identity: Mapping[str, Any]) -> list[str]:
    """Return a note if ``folder`` is a default one, and that of another config holds this run, unfinished.

    A default ``output_dir`` ends in the name of the config. So a killed run that is started again with another
    ``--config`` would not find its checkpoints.

    Args:
        folder: the ``output_dir``; one that is not of the form ``runs/<recipe>-<config>`` has no note.
    """
    prefix = f"{recipe_name}-"
    if folder.parent != Path("runs") or not folder.name.startswith(prefix):
        return []
    # By name, steps in digits of equal number: the run that came farthest is the last.
    found = [
        (checkpoints[-1].name, other)
        for other in sorted(folder.parent.iterdir() if folder.parent.is_dir() else [])
        if other != folder and other.name.startswith(prefix) and _is_unfinished(other, identity)
        if (checkpoints := list_checkpoints(other / "checkpoints"))
    ]
    if not found:
        return []
    _, other = max(found)
    return [f"note: {other} holds an unfinished run of this recipe; --output_dir {other} continues it"]


def _is_unfinished(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder holds a run of this identity that neither finished nor is at work now."""
    try:
        record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        lock.look(folder)
        return not record["finished_steps"] and not differences(record["identity"], identity)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return False
