"""Files that survive a loss of power: their content is on the disk before their final name is."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_tree(folder: Path) -> None:
    """Call ``sync`` for each file and folder in ``folder``, then for ``folder`` itself."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically: a reader, or a restart after a crash, finds the old text or the new text.

    Writes to a temporary file, syncs it, and renames it.
    """
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)
