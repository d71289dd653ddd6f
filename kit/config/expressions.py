"""Module names, and regular expressions that match them. Plain Python."""

import re
from collections.abc import Iterable
from typing import Any

from kit.schema.fields import comma_separated

TARGETS = "all-linear, names of modules separated by commas, or a regular expression"


def module_names(value: Any) -> Any:
    """Split module names separated by commas into a list; ``all-linear`` stays a string.

    A string with a character that no name has is one regular expression, whose commas do not separate. Raises
    ``ValueError`` for an expression that Python cannot read.
    """
    if value == "all-linear":
        return value
    names = [value.strip()] if isinstance(value, str) and is_expression(value) else comma_separated(value)
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and is_expression(name):
            try:
                re.compile(name)
            except (re.error, RecursionError, OverflowError):
                raise ValueError from None
    return names


def is_expression(target: str) -> bool:
    """Return whether ``target`` is a regular expression, which has a character that no name of a module has."""
    return bool(re.search(r"[\\\[\](){}|*+?^$]", target))


def matches(name: str, target: str) -> bool:
    """Return whether ``target`` names a module, as peft reads it: its full name, or what its name ends with.

    A regular expression must match the full name from beginning to end, as peft reads a string.
    """
    if is_expression(target):
        return re.fullmatch(target, name) is not None
    return name == target or name.endswith(f".{target}")


def matches_any(name: str, targets: Iterable[str]) -> bool:
    """Return whether one of ``targets`` names a module, see ``matches``."""
    return any(matches(name, target) for target in targets)
