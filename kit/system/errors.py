"""Errors for the user: each problem has a place, found, expected, and what to do.

Plain Python, imported before anything slow. A ``UserError`` ends the script with status 2 and one ``error:``
block. A ``TrainingError`` ends it with status 1 and a message. Every other exception keeps its traceback.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, overload

from kit.system.visible import Layout, one_line


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake that the user can fix. Its texts are shown as one line each, unless they are a ``Layout``."""

    where: str  # a field, a flag or ``file:line``
    found: str
    expected: str = ""
    fix: str = ""  # what to type or change
    num_others: int = 0  # above 0: this stands for that number of other problems, which are not shown

    def __str__(self) -> str:
        text = f"{one_line(self.where)}: {one_line(self.found)}"
        if self.expected:
            text += f"; expected {one_line(self.expected)}"
        if self.fix:
            text += f"\n    -> {one_line(self.fix)}"
        return Layout(text)


class UserError(Exception):
    """One or more problems, reported together. The exit status of the script is 2."""

    exit_status = 2

    @overload
    def __init__(self, where: str, found: str, expected: str = "", fix: str = "") -> None: ...

    @overload
    def __init__(self, *problems: Problem) -> None: ...

    def __init__(self, *given: Any, **more: Any) -> None:
        """Take problems, or the fields of one ``Problem``."""
        is_made = all(isinstance(each, Problem) for each in given)
        self.problems: list[Problem] = list(dict.fromkeys(given)) if is_made else [Problem(*given, **more)]
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"error: {self.problems[0]}"
        num_shown = sum(not problem.num_others for problem in self.problems)
        num_others = sum(problem.num_others for problem in self.problems)
        first = f"error: {num_shown + num_others} problems"
        if num_others:
            first += f", {num_shown} of them shown"
        return "\n".join([first, *(f"  - {problem}" for problem in self.problems)])


class LateError(UserError):
    """An error in the middle of a run, raised on all ranks at the same call: the run saves, and ends with it."""


class TrainingError(Exception):
    """The run cannot continue, for a reason other than a wrong setting: a non-finite loss, a lost rank.

    The exit status of the script is 1.
    """

    exit_status = 1


def raise_if(problems: Iterable[Problem]) -> None:
    """Raise one ``UserError`` with all ``problems``, if there are any."""
    problems = list(problems)
    if problems:
        raise UserError(*problems)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty; else the name of its class."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def counted(number: int, noun: str) -> str:
    """Return ``1 process``, or ``2 processes``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def listed(names: Sequence[str], num_shown: int = 3, separator: str = ", ") -> str:
    """Return the first ``num_shown`` names, and how many others there are: ``a, b, c and 9 others``."""
    others = len(names) - num_shown
    return separator.join(names[:num_shown]) + (f" and {others} others" if others > 0 else "")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a hint, ``did you mean 'learning_rate'?``, or an empty string if no choice is similar."""
    close = get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def did_you_mean_path(path: str, siblings: Iterable[str]) -> str:
    """Return a hint to the most similar of ``siblings``, names in its folder, with and without endings."""
    name, stems = os.path.basename(path), {each: each.partition(".")[0] for each in siblings}
    alike = get_close_matches(name.partition(".")[0], stems.values(), n=1, cutoff=0.6)
    close = get_close_matches(name, [each for each in stems if stems[each] in alike], n=1, cutoff=0.6)
    return f"did you mean {os.path.join(os.path.dirname(path), close[0])!r}?" if close else ""


def kind(value: Any) -> str:
    """Return the JSON type of a value, for a message: ``a string``, ``an object``, ``null``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


# The last one is the message into which safetensors turns a MemoryError.
_NO_MEMORY = re.compile(
    r"out of memory|_STATUS_ALLOC_FAILED|(can't|cannot) allocate memory|bad_alloc|PyObject pointer is null",
    re.IGNORECASE,
)


def causes(error: BaseException) -> list[BaseException]:
    """Return ``error`` and the exceptions that led to it (``__cause__`` and ``__context__``), the earliest last."""
    errors = [error]
    for later in errors:  # the list grows in the loop, so the causes of causes are visited too
        for earlier in (later.__cause__, later.__context__):
            if earlier is not None and earlier not in errors:
                errors.append(earlier)
    return errors


def out_of_memory(error: BaseException) -> BaseException | None:
    """Return the first of ``causes(error)`` that reports a lack of GPU or CPU memory; None if none does."""
    for cause in causes(error):
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return cause
        if isinstance(cause, RuntimeError | OSError) and _NO_MEMORY.search(str(cause)):
            return cause
    return None


class Problems(list[Problem]):
    """The problems that several checks found, collected so that they can be reported together."""

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch a ``UserError`` raised in the ``with`` block, add its problems to this list, and continue after it."""
        try:
            yield
        except UserError as error:
            self += error.problems

    def raise_if_any(self) -> None:
        """Raise one ``UserError`` with all problems, if there are any."""
        raise_if(self)
