"""What a user can be told: problems with a place, what was found, what was expected, what to do.

Plain Python, imported before anything heavy. A ``UserError`` ends the script with status 2 and one ``error:``
block; every other exception is a failure and keeps its traceback.
"""

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing the user can mend. ``where`` is a field, a flag or ``file:line``."""

    where: str
    found: str
    expected: str = ""
    fix: str = ""
    num_others: int = 0  # that this one only counts

    def __str__(self) -> str:
        text = f"{self.where}: {self.found}"
        if self.expected:
            text += f"; expected {self.expected}"
        if self.fix:
            text += f"\n    -> {self.fix}"
        return text


class UserError(Exception):
    """One or more problems, told all at once. Exit status 2."""

    exit_status = 2

    def __init__(self, *problems: Problem) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"error: {self.problems[0]}"
        num_shown = sum(not problem.num_others for problem in self.problems)
        num_others = sum(problem.num_others for problem in self.problems)
        more = f", {num_shown} of them shown" if num_others else ""
        return "\n".join([f"error: {num_shown + num_others} problems{more}", *(f"  - {p}" for p in self.problems)])


class TrainingError(Exception):
    """The run cannot go on, and no setting is plainly at fault (a non-finite loss, a lost rank). Exit status 1."""

    exit_status = 1


def raise_if(problems: Iterable[Problem]) -> None:
    """Raise one ``UserError`` holding all ``problems``, if there are any."""
    problems = list(problems)
    if problems:
        raise UserError(*problems)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint such as ``did you mean 'learning_rate'?``, or an empty string."""
    close = get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def kind(value: Any) -> str:
    """What a value is called where another was expected, in the words of JSON: ``a text``, ``an object``, ``null``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {str: "a text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


# The last is what safetensors makes of a MemoryError.
_NO_MEMORY = re.compile(
    r"out of memory|_STATUS_ALLOC_FAILED|(can't|cannot) allocate memory|bad_alloc|PyObject pointer is null",
    re.IGNORECASE,
)


def causes(error: BaseException) -> list[BaseException]:
    """``error``, and all it was raised from or while handling, the first cause last."""
    found = [error]
    for each in found:
        found += [other for other in (each.__cause__, each.__context__) if other is not None and other not in found]
    return found


def out_of_memory(error: BaseException) -> BaseException | None:
    """The one of its ``causes`` that says memory ran out, of a GPU or of the CPU; None if none does."""
    for each in causes(error):
        if isinstance(each, MemoryError) or (isinstance(each, OSError) and each.errno == errno.ENOMEM):
            return each
        if isinstance(each, RuntimeError | OSError) and _NO_MEMORY.search(str(each)):
            return each
    return None


class Problems(list[Problem]):
    """Collects what several checks find, to tell it all at once."""

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Keep the problems of a ``UserError`` raised inside, and go on after the block."""
        try:
            yield
        except UserError as error:
            self += error.problems

    def raise_if_any(self) -> None:
        raise_if(self)
