"""The result of a check, and the list of results that is printed while it grows.

Plain Python. Promises: each result is printed when its check ends. A check that raises is a failed check, not a
traceback.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from kit.console import show
from kit.errors import Problem, UserError
from kit.secrets import redacted
from kit.visible import one_line

Status = Literal["ok", "warn", "fail"]
FAILED = 2  # exit status: a check failed


@dataclass(frozen=True)
class Result:
    """What one check found."""

    name: str
    status: Status
    found: str
    fix: str = ""  # what to do; empty if there is nothing to do
    host: str = ""  # the machine, if several take part

    def __str__(self) -> str:
        host = f"{one_line(self.host)}: " if self.host else ""
        text = f"{self.status:<5} {host}{self.name:<17} {one_line(self.found)}"
        return f"{text}\n      -> {one_line(self.fix)}" if self.fix else text


def ok(name: str, found: str) -> Result:
    """Return the result of a check that found nothing wrong."""
    return Result(name, "ok", found)


def of_problems(name: str, problems: Iterable[Problem], found: str) -> Result:
    """Return a failed result with all ``problems``; if there are none, one that is ok and says ``found``."""
    descriptions = []
    fixes = []
    for problem in problems:
        expected = f"; expected {problem.expected}" if problem.expected else ""
        descriptions.append(f"{problem.where}: {problem.found}{expected}")
        if problem.fix and problem.fix not in fixes:
            fixes.append(problem.fix)
    if not descriptions:
        return ok(name, found)
    return Result(name, "fail", "; ".join(descriptions), "; ".join(fixes))


class Report:
    """All results so far. Each one is passed to ``on_result`` as soon as it is added."""

    def __init__(self, on_result: Callable[[Result], None], host: str = "") -> None:
        """``host``: put into each result."""
        self.results: list[Result] = []
        self._on_result = on_result
        self._host = host
        self._began = time.monotonic()

    def run(self, name: str, check: Callable[[], Result]) -> Result:
        """Call ``check``, and add its result. An exception becomes a failed result called ``name``."""
        try:
            result = check()
        except UserError as error:
            result = of_problems(name, error.problems, "")
        except Exception as error:  # a driver or library that is broken raises anything
            reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
            result = Result(name, "fail", f"{type(error).__name__}: {reason}", "correct what the message names")
        self.add(result)
        return result

    def add(self, result: Result) -> None:
        """Add one result without credentials, and pass it to ``on_result``."""
        found, fix = redacted(result.found), redacted(result.fix)
        self.results.append(replace(result, found=found, fix=fix, host=result.host or self._host))
        self._on_result(self.results[-1])

    @property
    def exit_status(self) -> int:
        """0, or ``FAILED`` if a check failed."""
        return FAILED if any(result.status == "fail" for result in self.results) else 0

    def end(self) -> int:
        """Print the summary. Returns the exit status."""
        counts = Counter(result.status for result in self.results)
        show(
            f"{len(self.results)} checks in {time.monotonic() - self._began:.0f} s: "
            f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail"
        )
        return self.exit_status
