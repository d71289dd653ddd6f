"""Parse a command line and its recipe file into one validated ``Request``.

Flags override the recipe, the recipe overrides the defaults.

Promises: whatever the user typed, there is no traceback, and all problems are reported together, each with its flag or
``file:line``. Imports plain Python, pydantic and PyYAML only, so a mistyped key is reported before torch is imported.
"""

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kit.config.adapter_base import fill_in_base
from kit.config.dataset_entry import DATA_SUFFIXES, DatasetEntry, flag_of_list, with_all_weights
from kit.config.fields import dataset_entries, expected, is_list, is_switch, is_text
from kit.config.hints import hint_for_word
from kit.config.launch_flags import Launch
from kit.config.other_kits import other_kits_word
from kit.config.recipe import DEFAULT_RECIPE, Recipe
from kit.config.recipe_file import read_recipe_file
from kit.config.scripts import TYPED_AS
from kit.config.validation import FLAGS, NAME, check_recipe, problems_with_secrets, validate
from kit.console import show
from kit.errors import Problem, UserError, did_you_mean, raise_if


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


ABOUT = "Fine-tune a causal language model. Each flag below Launch is also a key of the recipe; flags win."


def read_command_line(
    argv: list[str],
    stands_for: dict[str, str] | None = None,
    about: str = ABOUT,
    first: Sequence[str] = (),
    in_order: Sequence[str] = (),
    trains: bool = True,
) -> Request:
    """Merge the recipe file and the flags, and validate the result.

    Never raises for a user's mistake; it goes to ``problems``. ``--help`` prints the help and exits with status 0.

    Args:
        argv: the words after the script's name.
        stands_for: flag to other flag; if only the first is given, its value is also that of the other.
        about: what the script does, for ``--help``.
        first: the flags that matter most to it, which ``--help`` lists before the others.
        in_order: flags that words before the first flag are taken to mean, in this order.
        trains: whether the script trains. If not, what an adapter added when it was begun comes from it, so the
            flags of its run can be given as they are.
    """
    if any(word in ("-h", "--help") for word in argv):
        print_help(about, first)
    flags, problems, notes = read_flags(argv, in_order)
    flag_of = {name: f"--{name}" for name in flags}
    for flag, other in (stands_for or {}).items():
        if flag in flags and other not in flags:
            flags[other], flag_of[other] = flags[flag], f"--{flag}"
    launch_flags = {name: flags.pop(name) for name in Launch.model_fields if name in flags}
    launch, more, _ = validate(Launch, launch_flags, {name: f"--{name}" for name in launch_flags})
    problems += more

    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    # Keys that a word without a flag is taken for, or that a recipe file which cannot be read may hold.
    uncertain = {name for problem in problems for name in re.findall(r"--(\w+)", problem.fix)}
    names_model = {"model_name_or_path", "adapter_name_or_path"} & set(flags)
    name = launch.recipe or (None if names_model else DEFAULT_RECIPE)
    if name:
        try:
            file = read_recipe_file(name, flags.get("method"), flags.get("objective"))
            name, values, where = file.name, file.values, file.where
            problems += file.problems
            notes += [file.rate_note] if file.rate_note and "learning_rate" not in flags else []
        except UserError as error:
            problems += error.problems
            uncertain |= set(Recipe.model_fields) - set(flags)
    if "dataset" in flags and "eval_dataset" in values and "eval_dataset" not in flags:
        # The recipe's evaluation settings are for its own data set, which ``--dataset`` replaces.
        dropped = {"eval_dataset", "eval_dataset_config", "eval_dataset_split", "eval_dataset_revision"}
        if "eval_split_size" not in flags:
            dropped |= {"eval_on_start", "eval_strategy", "eval_steps", "predict_with_generate", "max_eval_samples"}
            dropped |= {"early_stopping_patience", "early_stopping_threshold", "keep_best", "max_new_tokens"}
            dropped.add("per_device_eval_batch_size")
        for key in dropped:
            values.pop(key, None)
    for flag, other in (("eval_dataset", "eval_split_size"), ("eval_split_size", "eval_dataset")):
        if flag in flags and other not in flags:  # a flag wins over the recipe's other source of evaluation data
            values.pop(other, None)
    file_optim = values.get("optim", "")
    values |= flags
    where |= {name: flag_of[name] for name in flags}
    problems += fill_in_base(values, where)
    if not trains and values.get("adapter_name_or_path"):
        for key in ("new_tokens", "trainable_tokens", "lora_modules_to_save"):
            values.pop(key, None)
    for flag, other in (stands_for or {}).items():
        if flag in uncertain:
            uncertain.add(other)
        if other not in values and other not in uncertain:  # only what stands for it is missing to this command
            meaning = Recipe.model_fields[flag].description or ""
            if not any(repr(flag) in did_you_mean(name, FLAGS) for name in set(flags) - set(FLAGS)):
                problems.append(Problem(flag, "missing", meaning, f"--{flag} {NAME}"))
            values[other] = NAME
    recipe, more = check_recipe(values, where, uncertain)
    if recipe and trains and "learning_rate" in where and "learning_rate" not in flags:
        more += _problems_with_rate_of_file(recipe, where, str(file_optim))
    secrets = problems_with_secrets({f"--{key}": value for key, value in launch_flags.items()}, {})
    secrets += problems_with_secrets(values, where)
    if secrets:
        return Request(launch, None, DEFAULT_RECIPE, secrets)  # no other problem: it might quote part of a credential
    name = name or _name_of(str(values.get("adapter_name_or_path") or values["model_name_or_path"]))
    if recipe and recipe.declared.rows != "answers" and recipe.objective not in name.split("-"):
        name = f"{name}-{recipe.objective}"  # it often follows a run of the same recipe that has learned the answers
    return Request(launch, recipe, name, problems + more, notes)


def _problems_with_rate_of_file(recipe: Recipe, where: dict[str, str], file_optim: str) -> list[Problem]:
    """Return a problem if the flag ``optim`` is a lion, and the recipe file has a rate for AdamW."""
    if not recipe.optim.startswith("lion") or file_optim.startswith("lion") or recipe.learning_rate is None:
        return []
    found = f"{recipe.learning_rate:g}, which is for {file_optim or 'AdamW'}: {recipe.optim} moves each weight further"
    fix = f"--learning_rate {recipe.learning_rate / 5:g}, or another rate 3 to 10 times below AdamW's"
    return [Problem(where["learning_rate"], found, fix=fix)]


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


def read_flags(argv: list[str], in_order: Sequence[str] = ()) -> tuple[dict[str, str], list[Problem], list[str]]:
    """Split a command line into flags.

    Args:
        in_order: as ``read_command_line`` takes it.

    Returns:
        The value of each flag, known or unknown, as typed, with ``-`` in its name read as ``_``; a problem for each
        word that is not a flag, and for each list given twice; and a note for each other flag given twice, of which
        the last value is taken: scripts append what they change.
    """
    given: dict[str, list[str]] = {}
    strays: list[list[str]] = []  # words without a flag, those that stand together in one list after the flag before
    words = list(argv)
    name = ""
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if not strays or strays[-1][0] != name or word.startswith("-"):
                strays.append([name])
            strays[-1].append(word)
            continue
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        # A negative number is a value; a word that starts with -- is the next flag.
        if not has_value and words and not words[0].startswith("--"):
            value = words.pop(0)
        elif not has_value and name in FLAGS and is_switch(FLAGS[name]):
            value = "true"
        given.setdefault(name, []).append(value)
    problems, notes = [], []
    for name, values in given.items():
        different = list(dict.fromkeys(values))
        shown = " and ".join(map(repr, different))
        if len(different) > 1 and name in FLAGS and is_list(FLAGS[name]):
            problems.append(Problem(f"--{name}", f"given twice: {shown}", "one list", flag_of_values(name, different)))
        elif len(different) > 1:
            notes.append(f"note: --{name} given twice: {shown}; the last one is taken")
    flags = {name: values[-1] for name, values in given.items()}
    free = [name for name in in_order if name not in given]
    if free and strays and not strays[0][0] and not any(word.startswith("-") for word in strays[0]):
        assigned = _assigned(strays[0][1:], free)
        if len(assigned) == len(strays[0]) - 1:
            flags |= assigned
            strays.pop(0)
    return flags, problems + _problems_with_words(strays, given, in_order), notes


def _problems_with_words(
    strays: list[list[str]], given: dict[str, list[str]], in_order: Sequence[str]
) -> list[Problem]:
    """Problems with words without a flag, each with the flag that it seems to belong to.

    Args:
        strays: words that stand together, with the name of the flag before them in front; it is empty for none.
        given: the values of each flag.
        in_order: as ``read_command_line`` takes it.
    """
    found, expected = "a word without a flag", "--flag value"
    free = [name for name in in_order if name not in given]
    if free and strays and not strays[0][0]:
        words = strays.pop(0)[1:]
        fix = " ".join(f"--{name} {shlex.quote(word)}" for name, word in _assigned(words, free).items())
        return [Problem(_shown(words), found, expected, fix), *_problems_with_words(strays, given, ())]
    problems = []
    more: dict[str, list[str]] = {}  # words that belong to a list, by its flag
    for before, *words in strays:
        name = words[0].lstrip("-").partition("=")[0].replace("-", "_")
        info = FLAGS.get(before)
        if words[0].startswith("-"):
            is_flag = name in FLAGS and len(words) == 2
            hint = (
                f"--{name} {shlex.quote(words[1])}" if is_flag else other_kits_word(name) or did_you_mean(name, FLAGS)
            )
        elif info and is_list(info):
            more.setdefault(before, []).extend(words)
            continue
        else:
            hint = " ".join(filter(None, map(hint_for_word, words))) or other_kits_word(name)
            flag = hint.partition(" ")[0].removeprefix("--")
            if flag in given and is_list(FLAGS[flag]):
                more.setdefault(flag, []).extend(words)
                continue
            if not hint and info and is_text(info):
                hint = f"--{before} {shlex.quote(' '.join([given[before][-1], *words]))}"
            hint = hint or did_you_mean(name, FLAGS)
        problems.append(Problem(_shown(words), found, expected, hint))
    for flag, words in more.items():
        problems.append(Problem(_shown(words), found, expected, flag_of_values(flag, [*given[flag], *words])))
    return problems


def _shown(words: Sequence[str]) -> str:
    return " ".join(map(repr, words))


def _assigned(words: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Each word with the flag that it is taken to mean: the next of ``names``, and the last for a file of data."""
    assigned: dict[str, str] = {}
    left = list(names)
    for word in words:
        name = left[-1] if left and word.lower().endswith(DATA_SUFFIXES) else next(iter(left), names[-1])
        if name in left:
            left.remove(name)
        has_final = os.path.isfile(os.path.join(word, "run.json")) and os.path.isdir(os.path.join(word, "final"))
        assigned.setdefault(name, os.path.join(word, "final") if has_final else word)
    return assigned


def flag_of_values(name: str, values: Sequence[str]) -> str:
    """Return the flag that gives several values of a list at once: ``--dataset a.jsonl,b.jsonl``."""
    if os.path.exists(spaced := " ".join(values)):  # a path with a space, which lost its quotes
        return f"--{name} {shlex.quote(spaced)}"
    if name in ("dataset", "eval_dataset"):
        entries: list[DatasetEntry] = []
        for value in values:
            try:
                # A name with a comma is one file if it stands alone, as after a shell's pattern.
                parsed = value if os.path.exists(value) else dataset_entries(value)
                parsed = [{"path": parsed}] if isinstance(parsed, str) else parsed
                entries += [DatasetEntry.model_validate(each) for each in parsed]
            except (ValueError, TypeError):  # not a list that YAML reads
                return f"--{name} {shlex.quote(values[-1])}"
        return flag_of_list(name, with_all_weights(entries))
    joined = ",".join(value.strip(",") for value in values)  # a space may stand beside the comma
    if any(value.lstrip().startswith("{") or value == "all-linear" or os.path.isfile(value) for value in values):
        joined = values[-1]
    return f"--{name} {shlex.quote(joined)}"


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
