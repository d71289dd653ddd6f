"""The result of a check, and the list of results that is printed while it grows.

Plain Python. Promises: each result is printed when its check ends; a check that breaks is a failed check, not a
traceback.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from kit.console import show
from kit.errors import Problem, UserError
from kit.secrets import redacted

Status = Literal["ok", "warn", "fail"]
FAILED = 2  # exit status: a check failed, with a cure that the user can apply


@dataclass(frozen=True)
class Result:
    """What one check found."""

    name: str
    status: Status
    found: str
    cure: str = ""  # what to do; empty if there is nothing to do
    host: str = ""  # the machine, if several take part

    def __str__(self) -> str:
        host = f"{self.host}: " if self.host else ""
        text = f"{self.status:<5} {host}{self.name:<17} {self.found}"
        return f"{text}\n      -> {self.cure}" if self.cure else text


def ok(name: str, found: str) -> Result:
    """Return the result of a check that found nothing wrong."""
    return Result(name, "ok", found)


def of_problems(name: str, problems: Iterable[Problem], found: str) -> Result:
    """Return a failed result with all ``problems``; if there are none, one that is ok and says ``found``."""
    problems = list(problems)
    if not problems:
        return ok(name, found)
    texts = [f"{p.where}: {p.found}" + (f"; expected {p.expected}" if p.expected else "") for p in problems]
    return Result(name, "fail", "; ".join(texts), "; ".join(dict.fromkeys(p.fix for p in problems if p.fix)))


class Report:
    """All results so far. Each one is passed to ``tell`` when it is there."""

    def __init__(self, tell: Callable[[Result], None], host: str = "") -> None:
        """
        Args:
            tell: prints a result, or sends it to the process that prints.
            host: put into each result.
        """
        self.results: list[Result] = []
        self._tell, self._host, self._began = tell, host, time.monotonic()

    def run(self, name: str, check: Callable[[], Result]) -> Result:
        """Call ``check``, and add its result. An exception becomes a failed result called ``name``."""
        try:
            result = check()
        except UserError as error:
            result = of_problems(name, error.problems, "")
        except Exception as error:  # a driver or library that is broken raises anything
            reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
            result = Result(name, "fail", f"{type(error).__name__}: {reason}", "mend what the message names")
        self.add(result)
        return result

    def add(self, result: Result) -> None:
        """Add one result, and tell it."""
        result = Result(result.name, result.status, redacted(result.found), redacted(result.cure),
                        result.host or self._host)  # fmt: skip
        self.results.append(result)
        self._tell(result)

    @property
    def status(self) -> Status:
        """The worst status of all results."""
        found = {result.status for result in self.results}
        return "fail" if "fail" in found else "warn" if "warn" in found else "ok"

    @property
    def exit_status(self) -> int:
        """0, or ``FAILED`` if a check failed."""
        return FAILED if self.status == "fail" else 0

    def end(self, as_json: bool) -> int:
        """Print the summary, or all results as one JSON object. Returns the exit status."""
        seconds = time.monotonic() - self._began
        if as_json:
            checks = [asdict(result) for result in self.results]
            show(json.dumps({"status": self.status, "seconds": round(seconds, 1), "checks": checks}, indent=1))
            return self.exit_status
        counts = [sum(result.status == status for result in self.results) for status in ("ok", "warn", "fail")]
        words = ", ".join(f"{count} {status}" for count, status in zip(counts, ("ok", "warn", "fail"), strict=True))
        show(f"{len(self.results)} checks in {seconds:.0f} s: {words}")
        return self.exit_status
