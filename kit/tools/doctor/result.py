"""The result of a check, and the list of results that is printed while it grows.

Plain Python. Promises: each result is printed when its check ends. A check that raises is a failed check, not a
traceback.
"""

import json
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

    def record(self) -> dict[str, str]:
        """Return it as ``--json`` prints it; scripts read the fix by the key ``cure``."""
        return {
            "name": self.name,
            "status": self.status,
            "found": self.found,
            "cure": self.fix,
            "host": self.host,
        }


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
        """
        Args:
            on_result: prints a result, or sends it to the process that prints.
            host: put into each result.
        """
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
        result = replace(
            result,
            found=redacted(result.found),
            fix=redacted(result.fix),
            host=result.host or self._host,
        )
        self.results.append(result)
        self._on_result(result)

    @property
    def status(self) -> Status:
        """The worst status of all results."""
        found = {result.status for result in self.results}
        if "fail" in found:
            return "fail"
        return "warn" if "warn" in found else "ok"

    @property
    def exit_status(self) -> int:
        """0, or ``FAILED`` if a check failed."""
        return FAILED if self.status == "fail" else 0

    def end(self, as_json: bool) -> int:
        """Print the summary, or all results as one JSON object. Returns the exit status."""
        seconds = time.monotonic() - self._began
        if as_json:
            checks = [result.record() for result in self.results]
            show(json.dumps({"status": self.status, "seconds": round(seconds, 1), "checks": checks}, indent=1))
            return self.exit_status
        counts = Counter(result.status for result in self.results)
        show(
            f"{len(self.results)} checks in {seconds:.0f} s: "
            f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail"
        )
        return self.exit_status
