"""Parse a command line and its recipe file into one validated ``Request``.

Flags override the recipe, the recipe overrides the defaults.

Promises: whatever the user typed, there is no traceback, and all problems are reported together, each with its flag or
``file:line``. Imports plain Python, pydantic and PyYAML only, so a mistyped key is reported before torch is imported.
"""

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kit.config.fields import expected, is_switch
from kit.config.hints import hint_for_word
from kit.config.launch_flags import Launch
from kit.config.other_kits import other_kits_word
from kit.config.recipe import DEFAULT_RECIPE, Recipe
from kit.config.recipe_file import read_recipe_file
from kit.config.scripts import TYPED_AS
from kit.config.validation import FLAGS, check_recipe, problems_with_secrets, validate
from kit.console import show
from kit.errors import Problem, UserError, did_you_mean, raise_if


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    launch: Launch
    # None only if there are ``problems``. It may be there with problems too: ``kit.strategy.launch`` then checks it
    # against the topology, so that all problems are reported together.
    recipe: Recipe | None
    recipe_name: str  # stem of the recipe file; without one, the last part of the model's name, or its run's name
    problems: list[Problem] = field(default_factory=list)


ABOUT = "Fine-tune a causal language model. Each flag below Launch is also a key of the recipe; flags win."


def read_command_line(
    argv: list[str], stands_for: dict[str, str] | None = None, about: str = ABOUT, first: Sequence[str] = ()
) -> Request:
    """Merge the recipe file and the flags, and validate the result.

    Never raises for a user's mistake; it goes to ``problems``. ``--help`` prints the help and exits with status 0.

    Args:
        argv: the words after the script's name.
        stands_for: flag to other flag; if only the first is given, its value is also that of the other.
        about: what the script does, for ``--help``.
        first: the flags that matter most to it, which ``--help`` lists before the others.
    """
    if any(word in ("-h", "--help") for word in argv):
        print_help(about, first)
    flags, problems = read_flags(argv)
    for flag, other in (stands_for or {}).items():
        if flag in flags:
            flags.setdefault(other, flags[flag])
    launch_flags = {name: flags.pop(name) for name in Launch.model_fields if name in flags}
    launch, more, _ = validate(Launch, launch_flags, {name: f"--{name}" for name in launch_flags})
    problems += more

    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    uncertain: set[str] = set()  # keys that a recipe file which cannot be read may hold
    name = launch.recipe or (None if "model_name_or_path" in flags else DEFAULT_RECIPE)
    if name:
        try:
            file = read_recipe_file(name, flags.get("method"))
            name, values, where = file.name, file.values, file.where
            problems += file.problems
        except UserError as error:
            problems += error.problems
            uncertain = set(Recipe.model_fields) - set(flags)
    if "dataset" in flags and "eval_dataset" in values and "eval_dataset" not in flags:
        # The recipe's evaluation settings are for its own data set, which ``--dataset`` replaces.
        dropped = {"eval_dataset"}
        if "eval_split_size" not in flags:
            dropped |= {"eval_on_start", "eval_strategy", "eval_steps", "predict_with_generate", "max_eval_samples"}
            dropped |= {"early_stopping_patience", "early_stopping_threshold"}
        for key in dropped:
            values.pop(key, None)
    for flag, other in (("eval_dataset", "eval_split_size"), ("eval_split_size", "eval_dataset")):
        if flag in flags and other not in flags:  # a flag wins over the recipe's other source of evaluation data
            values.pop(other, None)
    values |= flags
    where |= {flag: f"--{flag}" for flag in flags}
    recipe, more = check_recipe(values, where, uncertain)
    secrets = problems_with_secrets({f"--{key}": value for key, value in launch_flags.items()}, {})
    secrets += problems_with_secrets(values, where)
    if secrets:
        return Request(launch, None, DEFAULT_RECIPE, secrets)  # no other problem: it might quote part of a credential
    name = name or _name_of(str(values["model_name_or_path"]))
    return Request(launch, recipe, name, problems + more)


def _name_of(model: str) -> str:
    """The last part of a model's name; for ``final/`` or a checkpoint the name of its run's folder."""
    path = Path(model)
    if path.name == "final" or re.fullmatch(r"step-\d+", path.name):
        path = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return path.name or Path(model).name or "run"


def read_recipe(argv: list[str]) -> Recipe:
    """Return the recipe for a command that starts no run. Raises ``UserError`` with all problems."""
    request = read_command_line(argv)
    raise_if(request.problems)
    assert request.recipe is not None
    return request.recipe


def read_flags(argv: list[str]) -> tuple[dict[str, str], list[Problem]]:
    """Split a command line into flags.

    Returns:
        The value of each flag, known or unknown, as typed, with ``-`` in its name read as ``_``; and a problem for each
        word that is not a flag, and for each flag given twice.
    """
    flags: dict[str, str] = {}
    problems = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            name = word.lstrip("-").partition("=")[0]
            hint = hint_for_word(word) or other_kits_word(name) or did_you_mean(name, FLAGS)
            problems.append(Problem(repr(word), "a word without a flag", "--flag value", hint))
            continue
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        # A negative number is a value; a word that starts with -- is the next flag.
        if not has_value and words and not words[0].startswith("--"):
            value = words.pop(0)
        elif not has_value and name in FLAGS and is_switch(FLAGS[name]):
            value = "true"
        if name in flags:
            problems.append(Problem(f"--{name}", f"given twice: {flags[name]!r} and {value!r}", fix="keep one"))
        else:
            flags[name] = value
    return flags, problems


def print_help(about: str = ABOUT, first: Sequence[str] = ()) -> NoReturn:
    """Print ``first``, then all other flags by group, with unit, default and meaning, and exit with status 0."""
    script = f"accelerate launch recipes/{Path(sys.argv[0]).name}"
    lines = [
        f"usage: {os.environ.get(TYPED_AS, script)} [--config C] [--recipe R] [--flag value ...]",
        "",
        *about.strip().replace(script, os.environ.get(TYPED_AS, script)).splitlines(),
    ]
    lines += ["", "What matters here"] if first else []
    group = None
    for name in dict.fromkeys([*first, *FLAGS]):
        info = FLAGS[name]
        extra: Any = info.json_schema_extra
        if extra["group"] != group and name not in first:
            group = extra["group"]
            lines += ["", group]
        unit = f" [{extra['unit']}]" if extra["unit"] else ""
        default = "required" if info.is_required() else f"default: {_shown_default(info.default)}"
        flag = f"  --{name} <{expected(info)}>{unit}  ({default})"
        lines += [*textwrap.wrap(flag, 120, subsequent_indent=" " * 8), f"      {info.description}"]
    show("\n".join(lines))
    sys.exit(0)


def _shown_default(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
