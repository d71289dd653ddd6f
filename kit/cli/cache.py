"""``kit cache``: list or verify what the cache holds, and remove what no run has used for long."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.console import Parser, show
from kit.errors import Problem, UserError
from kit.visible import joined

HELP = "list or verify what the cache holds, and remove what no run has used for long"
_FOLDERS = ("samples", "references")  # of the cache, with entries


@dataclass(frozen=True)
class Entry:
    """An entry of the cache: a tokenised data set, or the log-probabilities that a reference gives to one."""

    folder: Path
    num_bytes: int
    used: float  # when a run opened it last, in seconds since the epoch
    about: dict[str, Any] = field(default_factory=dict)  # empty if it is damaged, or was never finished


def run(argv: list[str]) -> int:
    """List the entries of the cache, read every byte of them, or remove old ones.

    Returns 1 if ``verify`` finds a damaged entry. Raises ``UserError`` if one may not be removed.
    """
    parser = Parser(prog="kit cache", description=HELP + ".", allow_abbrev=False)
    parser.add_argument("action", nargs="?", choices=("list", "verify", "prune"), default="list")
    parser.add_argument("--older_than", type=int, metavar="DAYS", help="prune: what no run has opened for so many days")
    options = parser.parse_args(argv)
    days = options.older_than
    if (options.action == "prune") != (days is not None) or (days is not None and days < 1):
        parser.error("kit cache prune --older_than DAYS")
    from kit.cache import cache_folder, delete_old, is_whole

    cache = cache_folder()
    try:
        entries = sorted(_entries(cache), key=lambda entry: entry.used)
        lines = [*_table(entries), f"{cache}: {_total(entries)}"]
        damaged = []
        if options.action == "verify":
            finished = [entry for entry in entries if not entry.folder.name.startswith(".")]  # others a kill left
            damaged = [entry for entry in finished if not is_whole(entry.folder)]
            lines = [*_table(damaged), f"{cache}: {len(finished)} entries read, {len(damaged)} damaged"]
        if options.action == "prune":
            seconds = 86400.0 * days
            old = [entry for entry in entries if time.time() - entry.used > seconds]
            for entry in old:
                shutil.rmtree(entry.folder)
            for folder in (cache / name for name in (*_FOLDERS, "digests")):  # also locks and stored hashes
                if folder.is_dir():
                    delete_old(folder, seconds)
            lines = [*_table(old), f"removed: {_total(old)}"]
    except OSError as error:
        raise UserError(Problem("cache", f"{error.filename or cache}: {error.strerror or error}")) from None
    show(joined(lines))
    return int(bool(damaged))


def _entries(cache: Path) -> Iterator[Entry]:
    """All entries, also damaged and unfinished ones."""
    from kit.cache import read_entry

    for folder in (path for name in _FOLDERS for path in (cache / name).glob("*/")):
        status = folder.stat()
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        try:
            about = dict(read_entry(folder)["info"]["about"])
        except (OSError, ValueError, KeyError, TypeError):
            about = {}
        yield Entry(folder, num_bytes, status.st_mtime, about)


def _table(entries: list[Entry]) -> list[str]:
    """A line for each entry, the one used last at the end."""
    lines = []
    for each in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used))
        about = json.dumps(each.about, ensure_ascii=False) if each.about else "(damaged or unfinished)"
        lines.append(f"{each.folder.name[:12]:<12}  used {used}  {each.num_bytes / 1e6:>12,.1f} MB  {about}")
    return lines


def _total(entries: list[Entry]) -> str:
    return f"{len(entries)} entries, {sum(each.num_bytes for each in entries) / 1e6:,.1f} MB"
