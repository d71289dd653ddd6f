"""Counts of rows, remarks, and bad rows: how they are reported, and skipped."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from kit.data.read.sources import FIX, FIX_ROWS, MAX_SKIPPED_FRACTION, shown
from kit.system import durable
from kit.system.console import say
from kit.system.errors import Problem, UserError, raise_if

SKIPPED_FILE = "skipped_rows.jsonl"
# Losses of samples, as texts that take max_length.
LOSSES = {
    "num_truncated": "truncated at {} tokens",
    "num_split": "chunked into pieces of {} tokens",
    "num_dropped_long": "left out: longer than {} tokens",
    "num_dropped_media": "left out: longer than {} tokens, and with images or audio, which are never truncated",
    "num_dropped_unsupervised": "dropped: nothing supervised left",
}
MAX_UNUSED = 10  # columns in a note
NOT_USED = ": not in the text: "  # in the note that lists them


class BadRow(NamedTuple):
    """A problem of one row, because of which it cannot be used."""

    part: int  # of the source
    number: int  # of the row in that part
    origin: str  # ``file:line``
    problem: Problem  # ``where`` is a field of the row, or empty
    is_common: bool  # usually many rows have the same problem, such as one with the template: it is reported once

    @property
    def problem_with_origin(self) -> Problem:
        """The problem; its ``where`` begins with the origin of the row."""
        return replace(self.problem, where=f"{self.origin} {self.problem.where}".rstrip())


@dataclass
class Tally:
    """The counts and problems of rows."""

    bad: list[BadRow] = field(default_factory=list)  # in the order of the rows; a row may be there more than once
    problems: list[Problem] = field(default_factory=list)  # others, for which no row can be skipped
    unused: Counter[str] = field(default_factory=Counter)  # rows for each column, or key of messages, not used
    counts: Counter[str] = field(default_factory=Counter)  # rows by outcome
    remarks: Counter[str] = field(default_factory=Counter)  # rows for each remark

    def add(self, other: "Tally") -> None:
        """Add those of other rows."""
        self.bad += other.bad
        self.problems += other.problems
        self.unused += other.unused
        self.counts += other.counts
        self.remarks += other.remarks

    def check(self, name: str, skips: bool, num_left: int) -> None:
        """Raise ``UserError`` if the dataset ``name`` cannot be used: because of its rows, or because none is left.

        Args:
            skips: rows that cannot be used may be skipped, unless there are too many.
            num_left: samples, or supervised tokens.
        """
        num_bad, num_rows = num_distinct(self.bad), self.counts["num_rows"]
        fix = FIX_ROWS if _are_too_many(num_bad, num_rows) else FIX
        raise_if(shown([*self.problems, *(() if skips else problems_of(self.bad))], name, fix))
        check_share(name, self.bad, num_bad, num_rows)
        if num_left:
            return
        found, fix = "no rows", ""
        if any(self.counts[key] for key in ("num_truncated", "num_dropped_long", "num_dropped_media")):
            found = f"none of {num_rows} samples has a supervised token within max_length"
            fix = "raise --max_length"
        elif num_rows:
            found = f"nothing in {num_rows} samples is supervised"
            fix = "`kit inspect` shows the loss mask"
        raise UserError(Problem(name, found, "at least one", fix), *problems_of(self.bad))

    def record(self) -> dict[str, Any]:
        """The record of a cache entry, as JSON values."""
        return {
            "counts": dict(self.counts),
            "remarks": dict(self.remarks),
            "unused": dict(self.unused),
            "skipped": listed(self.bad),
        }


def _are_too_many(num_bad: int, num_good: int) -> bool:
    """Whether these rows are too many to skip. One row always may be skipped."""
    return num_bad > max(1, MAX_SKIPPED_FRACTION * (num_bad + num_good))


def check_share(name: str, bad: Sequence[BadRow], num_bad: int, num_good: int) -> None:
    """Raise ``UserError`` if the rows of the source ``name`` that cannot be used are too many to skip.

    Args:
        bad: some of them, to be shown.
        num_good: rows that can be used.
    """
    if _are_too_many(num_bad, num_good):
        num = num_bad + num_good
        found = f"{num_bad} of {num} rows ({num_bad / num:.1%}) cannot be used"
        problem = Problem(name, found, f"at most {MAX_SKIPPED_FRACTION:.0%} to skip: more have a common cause")
        raise UserError(problem, *shown(problems_of(bad), name, FIX_ROWS))


def problems_of(bad: Iterable[BadRow]) -> list[Problem]:
    """All problems; one that many rows have is reported once, with the first of these rows."""
    single: list[Problem] = []
    common: dict[Problem, list[str]] = {}  # the origins of such rows
    for row in bad:
        if row.is_common:
            common.setdefault(row.problem, []).append(row.origin)
        else:
            single.append(row.problem_with_origin)
    for problem, (first, *others) in common.items():
        more = f" and {len(others)} more" if others else ""
        single.append(replace(problem, found=f"{problem.found} (at {first}{more})"))
    return single


def notes_of(name: str, record: Mapping[str, Any], max_length: int) -> list[str]:
    """Return notes for the user about the rows of the source ``name``, one per line.

    Args:
        record: what ``Tally.record`` returned.
    """
    counts, skipped = record["counts"], record["skipped"]
    num_rows, num_samples = counts.get("num_rows", 0), counts.get("num_encoded", 0)
    num_all = num_rows + len(skipped)
    lines = [
        f"{name}: {counts[key]} of {num_samples} samples {text.format(max_length)}"
        for key, text in LOSSES.items()
        if counts.get(key)
    ]
    if counts.get("num_blank_lines"):
        lines.append(f"{name}: {counts['num_blank_lines']} blank lines skipped")
    if skipped:
        share = f"{len(skipped)} of {num_all} rows ({len(skipped) / num_all:.1%})"
        first = f"{skipped[0]['row']} {skipped[0]['problems'][0]}"
        where = f"a run lists them in {SKIPPED_FILE} in its output_dir"
        lines.append(f"warning: {name}: {share} cannot be used and are skipped ({where}), first {first}")
    if unused := unused_shares(record):
        first_unused = [f"{key} ({share:.1%} of the rows)" for key, share in list(unused.items())[:MAX_UNUSED]]
        num_more = len(unused) - len(first_unused)
        more = f" and {num_more} more (`kit inspect`)" if num_more else ""
        lines.append(f"{name}{NOT_USED}{', '.join(first_unused)}{more}")
    items = "samples" if num_samples == num_rows else "conversations"
    return lines + [f"{name}: {count} of {num_rows} {items}: {text}" for text, count in record["remarks"].items()]


def unused_shares(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the columns, and keys of messages, that nothing reads, with the fraction of the rows that have a value."""
    num_rows = record["counts"].get("num_rows", 0) + len(record["skipped"])
    ordered = sorted(record["unused"].items(), key=lambda item: (-item[1], item[0]))
    return {name: count / num_rows for name, count in ordered}


def num_distinct(rows: Iterable[BadRow]) -> int:
    """Return the number of different rows. A row is there once for each thing that is wrong with it."""
    return len({(row.part, row.number) for row in rows})


def listed(rows: Iterable[BadRow]) -> list[dict[str, Any]]:
    """Each row once, in order, with all that is wrong with it: the objects of ``SKIPPED_FILE``."""
    problems: dict[str, list[str]] = {}  # of each row, by its origin
    for row in rows:
        text = str(row.problem).split("\n")[0].removeprefix(": ")
        problems.setdefault(row.origin, []).append(text)
    return [{"row": origin, "problems": texts} for origin, texts in problems.items()]


def write_listed(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write what ``listed`` returned to a ``SKIPPED_FILE``."""
    durable.write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def append_listed(path: Path, rows: Iterable[BadRow]) -> None:
    """Append rows to a ``SKIPPED_FILE``, without those that are in it: a stream skips a row again in each epoch.

    Several ranks may write to it.
    """
    try:
        known = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
        lines = [line for line in map(json.dumps, listed(rows)) if line not in known]
        with durable.open_to_append(path) as file:
            file.write("".join(f"{line}\n" for line in lines))
    except OSError as error:  # the rows are counted in the metrics nevertheless
        say(f"warning: {path} cannot be written ({error.strerror or error})")
