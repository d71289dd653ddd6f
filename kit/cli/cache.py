"""``kit cache``: list, verify or prune the cache of tokenised data and of stored log-probabilities."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.system.console import Parser, show
from kit.system.errors import UserError
from kit.system.visible import joined

HELP = "list, verify or prune the cache: tokenised data and stored log-probabilities"
_FOLDERS = ("samples", "references", "teachers")  # of the cache, with entries


@dataclass(frozen=True)
class Entry:
    """An entry of the cache: a tokenised dataset, or log-probabilities that a reference or a teacher gives to one."""

    folder: Path
    num_bytes: int
    used: float  # when a run opened it last, in seconds since the epoch
    about: str

    def __str__(self) -> str:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.used))
        return f"{self.folder.name[:12]:<12}  used {used}  {self.num_bytes / 1e6:>12,.1f} MB  {self.about}"


def run(argv: list[str]) -> int:
    """List the entries of the cache, read every byte of them, or remove old ones.

    Returns 1 if ``verify`` finds a damaged entry. Raises ``UserError`` if one may not be removed.
    """
    parser = Parser(prog="kit cache", description=HELP + ".", allow_abbrev=False)
    parser.add_argument("action", nargs="?", choices=("list", "verify", "prune"), default="list")
    parser.add_argument(
        "--older_than", type=int, metavar="DAYS", help="prune: remove entries that no run opened for DAYS days"
    )
    options = parser.parse_args(argv)
    days = options.older_than
    if (options.action == "prune") != (days is not None) or (days is not None and days < 1):
        parser.error("kit cache prune --older_than DAYS")
    from kit.system.cache import cache_folder, delete_old, is_whole

    cache = cache_folder()
    damaged = 0
    try:
        entries = sorted(_entries(cache), key=lambda entry: entry.used)
        end = f"{cache}: {_total(entries)}"
        if options.action == "verify":
            finished = [entry for entry in entries if not entry.folder.name.startswith(".")]  # others a kill left
            entries = [entry for entry in finished if not is_whole(entry.folder)]
            damaged = len(entries)
            end = f"{cache}: {len(finished)} entries read, {damaged} damaged"
        elif days is not None:
            entries = [entry for entry in entries if time.time() - entry.used > 86400.0 * days]
            for entry in entries:
                shutil.rmtree(entry.folder)
            for folder in (cache / name for name in (*_FOLDERS, "digests")):  # also locks and stored hashes
                if folder.is_dir():
                    delete_old(folder, 86400.0 * days)
            end = f"removed: {_total(entries)}"
    except OSError as error:
        raise UserError("cache", f"{error.filename or cache}: {error.strerror or error}") from None
    show(joined([*map(str, entries), end]))
    return int(bool(damaged))


def _entries(cache: Path) -> Iterator[Entry]:
    """All entries, also damaged and unfinished ones."""
    from kit.system.cache import read_entry

    for folder in (path for name in _FOLDERS for path in (cache / name).glob("*/")):
        status = folder.stat()
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        try:
            about = json.dumps(read_entry(folder)["info"]["about"], ensure_ascii=False)
        except (OSError, ValueError, KeyError, TypeError):
            about = "(damaged or unfinished)"
        yield Entry(folder, num_bytes, status.st_mtime, about)


def _total(entries: list[Entry]) -> str:
    return f"{len(entries)} entries, {sum(each.num_bytes for each in entries) / 1e6:,.1f} MB"
