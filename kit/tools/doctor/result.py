"""Results of checks: a line each, shown when the check ends, and a count at the end.

Plain Python. Promise: a check that raises is a failed check, not a traceback.
"""

from collections import Counter
from collections.abc import Callable

from kit.system.console import show, show_error
from kit.system.errors import UserError, first_line
from kit.system.visible import one_line

FAILED = 2  # exit status: a check failed


class CheckWarning(Exception):
    """A warning of a check: the run can start anyway."""

    def __init__(self, found: str, fix: str = "") -> None:
        super().__init__(one_line(found) + (f"\n    -> {one_line(fix)}" if fix else ""))


class Report:
    """The results so far."""

    def __init__(self, host: str = "", shows: bool = True) -> None:
        """
        Args:
            host: this machine, if several take part.
            shows: whether all results are shown; else failures alone.
        """
        self.counts: Counter[str] = Counter()  # ok, warn, fail
        self._host = f"{one_line(host)}: " if host else ""
        self._shows = shows

    def check(self, name: str, check: Callable[[], str]) -> None:
        """Call ``check`` and show the result. An exception other than ``CheckWarning`` is a failure."""
        try:
            self.add(name, "ok", one_line(check()))
        except CheckWarning as warning:
            self.add(name, "warn", str(warning))
        except UserError as error:
            self.add(name, "fail", "\n".join(map(str, error.problems)))
        except Exception as error:  # a driver or library that is broken raises anything
            self.add(name, "fail", one_line(f"{type(error).__name__}: {first_line(error)}"))

    def add(self, name: str, status: str, text: str) -> None:
        """Count and show one result."""
        self.counts[status] += 1
        line = f"{status:<5} {self._host}{name:<17} {text}"
        if self._shows:
            show(line)
        elif status == "fail":
            show_error(line)

    @property
    def exit_status(self) -> int:
        """0, or ``FAILED`` if a check failed."""
        return FAILED if self.counts["fail"] else 0

    def end(self) -> int:
        """Show the count. Returns the exit status."""
        counts = ", ".join(f"{self.counts[status]} {status}" for status in ("ok", "warn", "fail"))
        show(f"{self.counts.total()} checks: {counts}")
        return self.exit_status
