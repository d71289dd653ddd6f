"""Files that outlive a loss of power: on the disk before their names say that they are there."""

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
    """The same for all that is in a folder, and the folder."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def write_text(path: Path, text: str) -> None:
    """Write aside, sync, and rename: there is the old content or the new one, never a part."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)
