"""Patterns in the config of a saved adapter: regular expressions that peft matches with the names of modules.

Promise: a pattern that would be matched without end is refused in seconds. Nothing can stop Python's own matcher inside
a process, so another process tries the patterns first, with a limit on its CPU time.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.errors import Problem, listed
from kit.model.files import MAX_LAYERS

CPU_SECONDS = 3
# How peft puts a pattern into a longer one; of target_modules, rank_pattern, modules_to_save and layers_pattern.
_FORMS = ("{}", r"(.*\.)?({})$", r"(^|.*\.){}($|\..*)", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")
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


def check_patterns(config: dict[str, Any], path: Path, names: list[str]) -> list[Problem]:
    """Return the problem of an adapter's config whose patterns, or copies of layers, would take without end.

    Args:
        config: the values in the file.
        path: the file, for messages.
        names: the names of the model's modules.
    """
    copies = config.get("layer_replication")
    if copies and (not isinstance(copies, list) or len(copies) > MAX_LAYERS):
        return [Problem(f"{path} layer_replication", "too many layers", f"at most {MAX_LAYERS} ranges")]
    patterns = [pattern for pattern in _patterns(config) if _repeats(pattern)]
    if not take_without_end([form.replace("{}", pattern) for pattern in patterns for form in _FORMS], names):
        return []
    shown = listed([repr(pattern[:80]) for pattern in patterns])
    found = f"matching {shown} with the names of {len(names)} modules takes more than {CPU_SECONDS} seconds"
    return [Problem(str(path), found, "names of modules, or a pattern without nested repetitions")]


def take_without_end(patterns: list[str], names: list[str]) -> bool:
    """Return whether it takes more than ``CPU_SECONDS`` to match ``patterns`` with ``names``."""
    repeating = [pattern for pattern in patterns if _repeats(pattern)]
    if not repeating:
        return False
    # -I: no variable of the environment and no file in the working folder has an effect on the process.
    command = [sys.executable, "-I", "-S", "-c", _TRY, str(CPU_SECONDS)]
    done = subprocess.run(command, input=json.dumps([repeating, names]), capture_output=True, text=True, check=False)
    return done.returncode < 0  # peft reports patterns that are none


def _repeats(pattern: str) -> bool:
    return any(char in pattern for char in "*+?{")


def _patterns(config: dict[str, Any]) -> Iterator[str]:
    """All strings that peft takes for patterns."""
    for key in ("target_modules", "exclude_modules"):
        if isinstance(config.get(key), str):
            yield config[key]
    for key in ("layers_pattern", "modules_to_save"):
        values = config.get(key)
        yield from (value for value in (values if isinstance(values, list) else [values]) if isinstance(value, str))
    for key in ("rank_pattern", "alpha_pattern"):
        if isinstance(config.get(key), dict):
            yield from config[key]
