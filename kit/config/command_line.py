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

from kit.config.adapter_base import fill_in_base
from kit.config.commands import TYPED_AS
from kit.config.dataset_entry import DATA_SUFFIXES
from kit.config.launch_flags import Launch
from kit.config.optimisers import OPTIMISERS, Optimiser
from kit.config.other_kits import hint_for_other_key
from kit.config.recipe import DEFAULT_RECIPE, Recipe
from kit.config.recipe_file import read_recipe_file
from kit.config.settings.evaluation import EvalSettings
from kit.config.settings.objective import takers
from kit.config.validation import FLAGS, NAME, check_recipe, problems_with_secrets, validate
from kit.schema.fields import expected, is_list, is_switch
from kit.system.console import show
from kit.system.errors import Problem, UserError, did_you_mean, raise_if


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    launch: Launch
    # None only if there are ``problems``. It may be there with problems too: ``kit.strategy.launch`` then checks it
    # against the topology, so that all problems are reported together.
    recipe: Recipe | None
    # Stem of the recipe file; without one, the last part of the model's name, or its run's name. An objective over
    # preferences is part of it.
    recipe_name: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # lines for the user, such as which of two values is taken


ABOUT = "Fine-tune a language model. Flags below the group Launch are also keys of a recipe file; flags override it."


def read_command_line(
    argv: list[str],
    stands_for: dict[str, str] | None = None,
    about: str = ABOUT,
    first: Sequence[str] = (),
    positional: Sequence[str] = (),
    trains: bool = True,
) -> Request:
    """Merge the recipe file and the flags, and validate the result.

    Never raises for a user's mistake; it goes to ``problems``. ``--help`` prints the help and exits with status 0.

    Args:
        argv: the words after the script's name.
        stands_for: flag to other flag; if only the first is given, its value is also that of the other.
        about: what the script does, for ``--help``.
        first: its main flags, which ``--help`` lists before the others.
        positional: the flags that positional arguments stand for, in this order.
        trains: whether the script trains. If not, what an adapter added when it was begun comes from it, so the
            flags of its run can be given as they are.
    """
    if any(word in ("-h", "--help") for word in argv):
        print_help(about, first)
    flags, problems, notes = read_flags(argv, positional)
    typed = {name: f"--{name}" for name in flags}
    launch_flags = {name: flags.pop(name) for name in Launch.model_fields if name in flags}
    launch, more, _ = validate(Launch, launch_flags, typed)
    problems += more

    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    uncertain: set[str] = set()  # keys that a recipe file which cannot be read may hold
    names_model = {"model_name_or_path", "adapter_name_or_path"} & set(flags)
    name = launch.recipe or (None if names_model else DEFAULT_RECIPE)
    if name:
        try:
            file = read_recipe_file(name, flags.get("method"), flags.get("objective"))
            name, values, where = file.name, file.values, file.where
            problems += file.problems
            notes += [file.method_note] if file.method_note else []
            notes += [file.rate_note] if file.rate_note and "learning_rate" not in flags else []
        except UserError as error:
            problems += error.problems
            uncertain = set(Recipe.model_fields) - set(flags)
    for key in _replaced(flags, values):
        values.pop(key, None)
    values |= flags
    where |= typed
    problems += fill_in_base(values, where)
    if not trains and values.get("adapter_name_or_path"):
        for key in ("new_tokens", "trainable_tokens", "lora_modules_to_save"):
            values.pop(key, None)
    if not trains and {"tools", "environment"} & set(values):  # any model can be asked with them, without rewards too
        values.setdefault("objective", takers("tools")[0])
        uncertain |= {"rewards"} - set(values)
    for flag, other in (stands_for or {}).items():
        if other in values or other in uncertain:
            continue
        if flag not in {*values, *uncertain}:
            problems.append(Problem(flag, "missing", Recipe.model_fields[flag].description or "", f"--{flag} {NAME}"))
        values[other], where[other] = values.get(flag, NAME), f"--{flag}"
    recipe, more = check_recipe(values, where, uncertain)
    if secrets := problems_with_secrets(launch_flags | values, where):
        return Request(launch, None, DEFAULT_RECIPE, secrets)  # no other problem: it might quote part of a credential
    name = name or _name_of(str(values.get("adapter_name_or_path") or values["model_name_or_path"]))
    compares = recipe and (recipe.declared.rows != "answers" or recipe.rolls_out)
    if recipe and compares and recipe.objective not in name.split("-"):
        name = f"{name}-{recipe.objective}"  # it often follows SFT with the same recipe
    return Request(launch, recipe, name, problems + more, notes)


def _replaced(flags: dict[str, str], values: dict[str, Any]) -> set[str]:
    """The keys of a recipe file that are about something which a flag replaces."""
    keys: set[str] = set()
    if "eval_dataset" in flags:
        keys = {"eval_split_size"}
    elif "eval_split_size" in flags:
        keys = {"eval_dataset", "eval_dataset_split"}
    elif "dataset" in flags and "eval_dataset" in values:  # the recipe evaluates on what belongs to its own data
        keys = set(EvalSettings.model_fields)
        if {"rewards", "on_policy_share"} & {*values, *flags}:
            keys -= {"max_new_tokens", "per_device_eval_batch_size"}  # of rollouts too
    ours, theirs = (OPTIMISERS.get(str(each.get("optim")), Optimiser()) for each in (flags, values))
    if theirs.takes_adamw_rates and not ours.takes_adamw_rates:
        keys.add("learning_rate")  # which is for another optimiser; this one then asks for one
    return keys


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


def read_flags(argv: list[str], positional: Sequence[str] = ()) -> tuple[dict[str, str], list[Problem], list[str]]:
    """Split a command line into flags.

    Args:
        positional: as ``read_command_line`` takes it.

    Returns:
        The value of each flag, known or unknown, as typed, with ``-`` in its name read as ``_``; a problem for each
        word that is not a flag, and for each list given twice; and a note for each other flag given twice, of which
        the last value is taken: scripts append what they change.
    """
    given: dict[str, list[str]] = {}
    problems, notes = [], []
    words = list(argv)
    while words and not words[0].startswith("-") and (free := [each for each in positional if each not in given]):
        word = words.pop(0)
        given[free[-1] if word.lower().endswith(DATA_SUFFIXES) else free[0]] = [_model_in(word)]
    name = ""
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            problems.append(_stray(word, name))
            if word.startswith("-") and words and not words[0].startswith("-"):
                words.pop(0)  # its value
            continue
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        # A negative number is a value; a word that starts with -- is the next flag.
        if not has_value and words and not words[0].startswith("--"):
            value = words.pop(0)
        elif not has_value and name in FLAGS and is_switch(FLAGS[name]):
            value = "true"
        given.setdefault(name, []).append(value)
    for name, values in given.items():
        different = list(dict.fromkeys(values))
        shown = " and ".join(map(repr, different))
        if len(different) > 1 and name in FLAGS and is_list(FLAGS[name]):
            problems.append(Problem(f"--{name}", f"given twice: {shown}", "one list, separated by commas"))
        elif len(different) > 1:
            notes.append(f"note: --{name} given twice: {shown}; the last one is taken")
    return {name: values[-1] for name, values in given.items()}, problems, notes


_WHICH_FLAG = "put its flag in front of it: --recipe, --config, --dataset, --model_name_or_path, or another one"


def _stray(word: str, flag: str) -> Problem:
    """The problem of an argument that belongs to no flag. ``flag``: the one before it; empty without."""
    if word.startswith("-"):
        name = word.strip("-").partition("=")[0].replace("-", "_")
        fix = hint_for_other_key(name) or did_you_mean(name, FLAGS)
    elif flag in FLAGS and is_list(FLAGS[flag]):
        fix = f"--{flag} takes several values separated by commas"
    else:
        fix = did_you_mean(word.partition("=")[0].replace("-", "_"), FLAGS) or _WHICH_FLAG
    return Problem(repr(word), "an argument without a flag", "--flag value", fix)


def _model_in(word: str) -> str:
    """The ``final/`` in a run's folder; else the word itself."""
    final = os.path.join(word, "final")
    return final if os.path.isfile(os.path.join(word, "run.json")) and os.path.isdir(final) else word


def print_help(about: str = ABOUT, first: Sequence[str] = ()) -> NoReturn:
    """Print ``first``, then all other flags by group, with unit, default and meaning, and exit with status 0."""
    script = f"accelerate launch recipes/{Path(sys.argv[0]).name}"
    lines = [
        f"usage: {os.environ.get(TYPED_AS, script)} [--config C] [--recipe R] [--flag value ...]",
        "",
        *about.strip().replace(script, os.environ.get(TYPED_AS, script)).splitlines(),
    ]
    lines += ["", "Main flags"] if first else []
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
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
