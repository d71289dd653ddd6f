"""Patterns in the config of a saved adapter: regular expressions that peft matches with the names of modules.

Promise: a pattern that would be matched without end is refused in seconds.
"""

from pathlib import Path
from typing import Any

from kit.config.expressions import CPU_SECONDS, repeats, take_without_end
from kit.model.pretrained.files import MAX_LAYERS
from kit.system.errors import Problem, listed

_KEYS = "target_modules exclude_modules layers_pattern modules_to_save rank_pattern alpha_pattern".split()
# How peft puts a pattern into a longer one; of target_modules, rank_pattern, modules_to_save and layers_pattern.
_FORMS = ("{}", r"(.*\.)?({})$", r"(^|.*\.){}($|\..*)", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")


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
    patterns = [pattern for key in _KEYS for pattern in _strings(config.get(key)) if repeats(pattern)]
    if not take_without_end([form.replace("{}", pattern) for pattern in patterns for form in _FORMS], names):
        return []
    shown = listed([repr(pattern[:80]) for pattern in patterns])
    found = f"matching {shown} with the names of {len(names)} modules takes more than {CPU_SECONDS} seconds"
    return [Problem(str(path), found, "names of modules, or a pattern without nested repetitions")]


def _strings(value: Any) -> list[str]:
    """The strings of a value of JSON: itself, or those in a list, or the keys of an object."""
    return [each for each in ([value] if isinstance(value, str) else value or []) if isinstance(each, str)]
