"""``kit cache``: list what the cache holds, check it, and remove what is old or too much."""

import argparse
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.console import Parser, show
from kit.errors import Problem, UserError
from kit.visible import joined, one_line

HELP = "list what the cache holds, check it, and remove what is old or too much"
_USAGE = "kit cache [list | verify | prune [--older_than AGE] [--keep SIZE] [--dry_run]]"
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
_TOKEN_BYTES = 4  # ids are int32
_FOLDERS = ("samples", "references")  # of the cache, with entries


@dataclass(frozen=True)
class Entry:
    """An entry of the cache: a tokenised data set, or the log-probabilities that a reference gives to one."""

    folder: Path
    num_bytes: int
    used: float  # when a run opened it last, in seconds since the epoch
    num_rows: int = 0
    num_tokens: int | None = 0  # None: it holds no tokens
    about: Mapping[str, Any] = field(default_factory=dict)


def run(argv: list[str]) -> int:
    """List, verify or prune the entries of the cache.

    Returns:
        The exit status: 1 if ``verify`` finds a damaged entry.

    Raises:
        UserError: an option is wrong, or an entry may not be removed.
    """
    parser = Parser(prog="kit cache", usage=_USAGE, description=HELP + ".", allow_abbrev=False)
    parser.add_argument("action", nargs="?", choices=("list", "verify", "prune"), default="list",
                        help="verify reads every byte; prune removes; default: list")  # fmt: skip
    parser.add_argument("--older_than", type=_seconds, metavar="AGE",
                        help="prune: remove what no run has opened for this long: 12h, 30d, 4w")  # fmt: skip
    parser.add_argument("--keep", type=_num_bytes, metavar="SIZE",
                        help="prune: remove what was not used for longest until this is left: 500MB, 20GB")  # fmt: skip
    parser.add_argument("--dry_run", action="store_true", help="prune: only say what would be removed")
    options = parser.parse_args(argv)
    if options.action != "prune" and (options.older_than is not None or options.keep is not None or options.dry_run):
        words = shlex.join(word for word in argv if word != options.action)
        parser.error(f"--older_than, --keep and --dry_run belong to prune: kit cache prune {words}")
    from kit.cache import cache_folder

    cache = cache_folder()
    try:
        entries = sorted(_entries(cache), key=lambda entry: entry.used)
        if options.action == "verify":
            return _verify(entries)
        if options.action == "prune":
            return _prune(cache, entries, options.older_than, options.keep, options.dry_run)
    except OSError as error:
        raise UserError(Problem("cache", f"{error.filename or cache}: {error.strerror or error}")) from None
    show("\n".join([*_table(entries), _total(cache, entries)]))
    return 0


def _entries(cache: Path) -> Iterator[Entry]:
    """All entries, also damaged ones."""
    from kit.cache import read_entry

    for folder in (path for name in _FOLDERS for path in (cache / name).glob("[!.]*")):
        if not folder.is_dir():
            continue
        try:
            status = folder.stat()
            num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        except FileNotFoundError:  # removed meanwhile
            continue
        try:
            values = read_entry(folder)
            num_tokens: int | None = None
            if "references" in values["arrays"]:
                num_rows = values["info"]["about"]["num_samples"]
                about = {"dataset": f"log-probabilities of the reference {values['info']['about']['model']}"}
            else:
                num_tokens = values["arrays"]["input_ids"]["bytes"] // _TOKEN_BYTES
                num_rows, about = values["info"]["counts"].get("num_rows", 0), values["info"].get("about", {})
            yield Entry(folder, num_bytes, status.st_mtime, num_rows, num_tokens, about)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            yield Entry(
                folder, num_bytes, status.st_mtime, about={"dataset": "(damaged: it is made again when needed)"}
            )


def _table(entries: list[Entry]) -> list[str]:
    """A line for each entry, the one used last at the end."""
    head = ("entry", "last used", "size", "rows", "tokens", "max_length", "template", "tokenizer", "data set")
    rows: list[tuple[str, ...]] = [head]
    for each in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used))
        values = [
            one_line(str(each.about.get(name, "-") or "-"))
            for name in ("max_length", "template", "tokenizer", "dataset")
        ]
        num_tokens = "-" if each.num_tokens is None else f"{each.num_tokens:,}"
        rows.append((each.folder.name[:12], used, _size(each.num_bytes), f"{each.num_rows:,}", num_tokens, *values))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    is_number = (False, False, True, True, True, True, False, False, False)
    lines = []
    for row in rows if entries else []:
        cells = [
            cell.rjust(n) if right else cell.ljust(n) for cell, n, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _verify(entries: list[Entry]) -> int:
    from kit.cache import verify

    faults = [fault for each in entries if (fault := verify(each.folder))]
    num_bytes = sum(each.num_bytes for each in entries)
    advice = "; a run makes them again" if faults else ""
    show(joined([*faults, f"{len(entries)} entries ({_size(num_bytes)}) read, {len(faults)} damaged{advice}"]))
    return int(bool(faults))


def _prune(cache: Path, entries: list[Entry], older_than: float | None, keep: int | None, is_dry: bool) -> int:
    """Remove entries that are too old, then those that were not used for longest until ``keep`` bytes are left."""
    from kit.cache import delete_old, remove, remove_leftovers

    now = time.time()
    left = sum(each.num_bytes for each in entries)
    removed: list[Entry] = []
    in_use: list[Entry] = []
    for each in entries:
        if not ((older_than is not None and now - each.used > older_than) or (keep is not None and left > keep)):
            continue
        if not is_dry and not remove(each.folder):
            in_use.append(each)
            continue
        left -= each.num_bytes
        removed.append(each)
    word = "would be removed" if is_dry else "removed"
    lines = [*_table(removed), f"{word}: {len(removed)} entries, {_size(sum(each.num_bytes for each in removed))}"]
    lines += [f"in use by a run, and left: {each.folder.name[:12]}" for each in in_use]
    if not is_dry:
        folders = [cache / name for name in _FOLDERS]
        if num := sum(remove_leftovers(folder) for folder in folders if folder.is_dir()):
            lines.append(f"removed: parts of {num} entries that killed processes left")
        for folder in (cache / name for name in ("digests", "packs")):  # made again if they are still needed
            if older_than is not None and folder.is_dir():
                delete_old(folder, older_than)
    show("\n".join([*lines, f"left: {_size(left)}"]))
    return 0


def _total(cache: Path, entries: list[Entry]) -> str:
    return f"{cache}: {len(entries)} entries, {_size(sum(each.num_bytes for each in entries))}"


def _size(num_bytes: float) -> str:
    for unit, factor in reversed(_BYTES.items()):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} kB"


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)([hdw])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no age such as 12h, 30d or 4w")
    return float(found[1]) * _SECONDS[found[2]]


def _num_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB|TB)|0", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB, 20GB or 0")
    return int(float(found[1] or 0) * _BYTES.get(found[2] or "MB", 0))
