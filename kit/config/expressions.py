"""Names of modules, and regular expressions of them, as a user gives them. Plain Python.

Promise: an expression that would be matched without end is refused in seconds. Nothing can stop Python's own matcher
inside a process, so another process tries it first, with a limit on its CPU time.
"""

import json
import re
import subprocess
import sys
from typing import Any

from kit.schema.fields import comma_separated

CPU_SECONDS = 3
_TRY = """
import json, re, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        pattern = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        continue
    for name in names:
        pattern.fullmatch(name)
        pattern.match(name)
"""
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


def take_without_end(patterns: list[str], names: list[str]) -> bool:
    """Return whether it takes more than ``CPU_SECONDS`` to match ``patterns`` with ``names``."""
    repeating = [pattern for pattern in patterns if repeats(pattern)]
    if not repeating:
        return False
    # -I: no variable of the environment and no file in the working folder has an effect on the process.
    command = [sys.executable, "-I", "-S", "-c", _TRY, str(CPU_SECONDS)]
    done = subprocess.run(command, input=json.dumps([repeating, names]), capture_output=True, text=True, check=False)
    return done.returncode < 0  # peft reports patterns that are none


def repeats(pattern: str) -> bool:
    """Return whether ``pattern`` has a part that may be matched several times."""
    return any(char in pattern for char in "*+?{")
