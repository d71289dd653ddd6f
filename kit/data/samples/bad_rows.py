"""Rows that cannot be used: how they are reported, and whether they may be skipped."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

from kit import durable
from kit.console import say
from kit.data.read.sources import FIX, FIX_ROWS, MAX_SKIPPED_SHARE, shown
from kit.errors import Problem, UserError

SKIPPED_FILE = "skipped_rows.jsonl"


class BadRow(NamedTuple):
    """Something wrong with one row, because of which it cannot be used."""

    part: int  # of the source
    number: int  # of the row in that part
    origin: str  # ``file:line``
    problem: Problem  # ``where`` is a field of the row, or empty
    is_common: bool  # usually many rows have the same problem, such as one with the template: it is reported once

    @property
    def problem_with_origin(self) -> Problem:
        """The problem; its ``where`` begins with the origin of the row."""
        return replace(self.problem, where=f"{self.origin} {self.problem.where}".rstrip())


class BadRows:
    """The rows of a source that cannot be used."""

    def __init__(self, rows: Iterable[BadRow] = (), keeps_all: bool = True) -> None:
        """
        Args:
            keeps_all: keep every row, to list it. If not, only what ``problems`` returns is kept: less memory.
        """
        self.rows: list[BadRow] = []
        self.num_rows = 0
        self._keeps_all = keeps_all
        self._single: list[Problem] = []
        self._common: dict[Problem, tuple[str, int]] = {}  # origin of the first such row, and how many there are
        self.add(rows)

    def add(self, rows: Iterable[BadRow]) -> None:
        """Add rows. All that is wrong with one row must come in the same call."""
        rows = list(rows)
        self.num_rows += num_distinct(rows)
        if self._keeps_all:
            self.rows += rows
        for row in rows:
            if row.is_common:
                first, count = self._common.get(row.problem, (row.origin, 0))
                self._common[row.problem] = (first, count + 1)
            else:
                self._single.append(row.problem_with_origin)

    def problems(self) -> list[Problem]:
        """All problems; one that many rows have is reported once, with the first of these rows."""
        common = []
        for problem, (first, count) in self._common.items():
            more = f" and {count - 1} more" if count > 1 else ""
            common.append(replace(problem, found=f"{problem.found} (at {first}{more})"))
        return self._single + common

    def shown(self, name: str, num_good: int, others: Sequence[Problem] = ()) -> list[Problem]:
        """The first of ``others`` and of these problems. The arguments are as below."""
        fix = FIX_ROWS if self._are_too_many(num_good) else FIX
        return shown([*others, *self.problems()], name, fix)

    def _are_too_many(self, num_good: int) -> bool:
        """Whether these rows are too many to skip. One row always may be skipped."""
        return self.num_rows > max(1, MAX_SKIPPED_SHARE * (self.num_rows + num_good))

    def raise_if_too_many(self, name: str, num_good: int) -> None:
        """Raise ``UserError`` if these rows of the source ``name`` are too many to skip.

        Args:
            num_good: rows of the source that can be used.
        """
        if self._are_too_many(num_good):
            num = self.num_rows + num_good
            found = f"{self.num_rows} of {num} rows ({self.num_rows / num:.1%}) cannot be used"
            problem = Problem(name, found, f"at most {MAX_SKIPPED_SHARE:.0%} to skip: more have a common cause")
            raise UserError(problem, *shown(self.problems(), name, FIX_ROWS))

    def record(self) -> list[list[Any]]:
        """The rows as JSON values."""
        return [[row.part, row.number, row.origin, astuple(row.problem), row.is_common] for row in self.rows]

    @classmethod
    def from_record(cls, record: Sequence[Sequence[Any]]) -> "BadRows":
        """The rows that ``record`` returned."""
        return cls(
            BadRow(part, number, origin, Problem(*problem), is_common)
            for part, number, origin, problem, is_common in record
        )

    def listed(self) -> list[dict[str, Any]]:
        """Each row once with all that is wrong with it, see ``listed``."""
        return listed(self.rows)


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


class SkippedFile:
    """The list of skipped rows that a stream extends while it is read. Several ranks may write to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[str] = set()  # the lines in it

    def append(self, rows: Sequence[BadRow]) -> None:
        """Append rows, without those that are in it: a resume, and each epoch, skip the same rows again."""
        if not rows:
            return
        try:
            if not self._known and self._path.exists():
                self._known = set(self._path.read_text(encoding="utf-8").splitlines())
            lines = [line for line in map(json.dumps, listed(rows)) if line not in self._known]
            self._known.update(lines)
            with durable.open_to_append(self._path) as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:  # the rows are counted in the metrics nevertheless
            say(f"warning: {self._path} cannot be written ({error.strerror or error})")
