"""Read YAML files: the values, and the ``file:line`` of each key for messages.

Promises: nothing in a file is executed, and any mistake in it becomes a ``Problem`` with its line.

A recipe may hold ``by_method``, a mapping of methods to settings. Those of the method in use override the others of the
file. If it does, ``--recipe llama-8b-lora`` is short for ``--recipe llama-8b --method lora``.

It may hold ``by_objective``, a mapping of objectives to settings: at its top, in the section of a method, or in both.
Those of the objective in use override the others, and those in the method's section override all. A ``learning_rate``
outside of ``by_objective`` is for the objective that the file itself names; with another one it is left out.
"""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kit.config.hints import METHODS, OBJECTIVES, recipe_names
from kit.config.other_kits import kit_of
from kit.config.paths import RECIPES
from kit.config.recipe import CODE, Recipe
from kit.config.settings.objective import DECLARED
from kit.schema.fields import comma_separated, json_or_string
from kit.scoring.own_metric import is_own
from kit.system.durable import read_small
from kit.system.errors import Problem, UserError, did_you_mean, first_line, raise_if

BY_METHOD, BY_OBJECTIVE = "by_method", "by_objective"
NAMES = {BY_METHOD: METHODS, BY_OBJECTIVE: OBJECTIVES}  # of the sections that each may have

MAX_BYTES = 1 << 20
PATHS = ("model_name_or_path", "dataset", "eval_dataset", "chat_template", "adapter_name_or_path", "teacher")


def find_file(name: str, folder: Path, kind: str) -> Path:
    """Find a YAML file: ``name`` is a path, or a name in ``folder`` with or without ``.yaml``.

    Args:
        kind: the name of the flag, for the message.

    Raises:
        UserError: there is no such file.
    """
    file = _existing(name, folder)
    if file is None:
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        found = f"{name!r} is a folder" if os.path.isdir(name) else f"no {kind} {name!r}"
        hint = did_you_mean(Path(name).stem, recipe_names() if kind == "recipe" else names)
        usual = "`kit recipes` lists them, most with a method: llama-8b-full, llama-8b-lora, llama-8b-qlora"
        hint = hint or (usual if kind == "recipe" else "")
        raise UserError(f"--{kind}", found, f"a YAML file, or one of {', '.join(names)}", hint)
    return file


def _existing(name: str, folder: Path) -> Path | None:
    candidates = [Path(name), folder / name, folder / f"{name}.yaml"]
    return next((path for path in candidates if os.path.isfile(path)), None)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a YAML mapping. Returns its values, and the line of each key: of one in a section as ``section.key``.

    Raises:
        UserError: the file cannot be read, is not a YAML mapping, or has a key twice.
    """
    values, lines, problems = _parse_yaml(path, yaml.SafeLoader)
    raise_if(problems)
    return values, lines


@dataclass(frozen=True)
class RecipeFile:
    """What a recipe file says for one method and one objective."""

    name: str  # of the recipe: the stem of the file, with the method if the file depends on it
    values: dict[str, Any]
    where: dict[str, str]  # the ``file:line key`` of each value
    problems: list[Problem]  # keys given twice, and mistakes in ``by_method`` and ``by_objective``
    rate_note: str = ""  # a line for the user, if the file has no good learning rate for the objective
    method_note: str = ""  # a line for the user, if the name has another method than the one that was asked for


def read_recipe_file(name: str, method: str | None = None, objective: str | None = None) -> RecipeFile:
    """Read a recipe file.

    All values stay strings, as the values of flags are, so that both are validated alike and YAML's own types do not
    matter: 1e-4 is a number, yes is not true, and the revision 0123 keeps its zero. (But ``chat_template_kwargs`` are
    read as JSON.) A relative path is looked for in the folder of the recipe first.

    Args:
        name: a path, a name in ``recipes/`` with or without ``.yaml``, or a name with a method: ``llama-8b-lora``.
        method: what the user asks for apart from ``name``; it wins.
        objective: what the user asks for; it wins.

    Raises:
        UserError: the file cannot be found or read, is not a YAML mapping, or is an Accelerate config.
    """
    path, of_name = None, None
    stem, _, last = name.removesuffix(".yaml").rpartition("-")
    if last in METHODS and not _existing(name, RECIPES):
        path = _existing(f"{stem}.yaml", RECIPES)
        of_name = last if path else None
    path = path or find_file(name, RECIPES, "recipe")
    values, lines, problems = _parse_yaml(path, yaml.BaseLoader)
    if {"compute_environment", "fsdp_config", "deepspeed_config"} & set(values):
        fix = f"--config {shlex.quote(str(path))} instead of --recipe"
        raise UserError("--recipe", f"{path} is an Accelerate config", "a recipe", fix)
    if kit := kit_of(values, {*Recipe.model_fields, *NAMES}, least=3):
        fix = f"kit convert {shlex.quote(str(path))} --out my.yaml"
        raise UserError("--recipe", f"{path} is a file of {kit}", "a recipe of this kit", fix)
    depends = BY_METHOD in values
    if of_name and not depends:
        find_file(name, RECIPES, "recipe")  # raises: the file does not depend on the method
    shown = _shown_path(path)
    where = {key: f"{shown}:{line} {key}" for key, line in lines.items()}
    parts, more = _parts(values, where)
    problems += more
    values = parts.pop("")
    method = str(method or of_name or values.get("method") or Recipe.model_fields["method"].default)
    own = str(values.get("objective") or Recipe.model_fields["objective"].default)

    def put(place: str) -> bool:
        """Let a section override what is there. Returns whether it has a learning rate."""
        chosen = parts.get(place, {})
        values.update(chosen)
        where.update({key: where[place + key] for key in chosen})
        return "learning_rate" in chosen

    put(f"{BY_METHOD}.{method}.")
    if depends and method in METHODS:
        values["method"] = method
    objective = str(objective or values.get("objective") or own)
    of_objective = f"{BY_OBJECTIVE}.{objective}."
    has_rate = put(of_objective), put(f"{BY_METHOD}.{method}.{of_objective}")
    problems += _own_functions(values, where)
    rate_note = ""
    if not any(has_rate) and {own, objective} <= set(OBJECTIVES):
        rate_note = _leave_out_rate(values, where, method, own, objective)
    given = values.get("chat_template_kwargs")
    if isinstance(given, dict):  # to a template, false and "false" are different
        values["chat_template_kwargs"] = json_or_string(given)
    for key in PATHS:
        if key in values:
            values[key] = _relative_to(path.parent, values[key])
    method_note = f"note: --method {method} overrides that of --recipe {name}" if of_name not in (None, method) else ""
    own_name = f"{path.stem}-{method}" if depends else path.stem
    return RecipeFile(own_name, values, where, problems, rate_note, method_note)


def _own_functions(values: dict[str, Any], where: dict[str, str]) -> Iterator[Problem]:
    """A problem for each key of a recipe with a function of the user's, which is code; it is left out of ``values``."""

    for key in CODE:
        names = comma_separated(values.get(key))
        if isinstance(names, list) and any(isinstance(name, str) and is_own(name) for name in names):
            del values[key]
            typed = ",".join(map(str, names))
            found = f"{typed}: code, which only the command line may name: a recipe is data, and may come from anyone"
            yield Problem(where[key], found, fix=f"remove the line, and type --{key} {shlex.quote(typed)}")


def _parts(
    values: dict[str, Any], where: dict[str, str], place: str = ""
) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Return the settings of a file and of each section, by the keys that lead there; and a problem of each mistake.

    Args:
        place: the keys that lead to ``values``: nothing, or ``by_method.lora.``.
    """
    kinds = [kind for kind in NAMES if kind not in place and BY_OBJECTIVE not in place]
    settings = {key: None if value in ("", "~", "null") else value for key, value in values.items() if key not in kinds}
    parts, problems = {place: settings}, []
    allowed = set(Recipe.model_fields) - ({"method", "objective"} if BY_OBJECTIVE in place else {"method"})
    for key in [key for key in settings if place and key not in allowed]:  # at the top, validation looks
        del settings[key]
        problems.append(Problem(where[place + key], "not allowed here", fix=did_you_mean(key, allowed)))
    for kind in (each for each in kinds if each in values):
        sections = values[kind]
        expected = f"{', '.join(NAMES[kind])}, each with key: value lines"
        if not isinstance(sections, dict):
            problems.append(Problem(where[place + kind], f"found {sections!r}", expected))
            sections = {}
        for name, section in sections.items():
            inner = f"{place}{kind}.{name}"
            if name in NAMES[kind] and isinstance(section, dict):
                of_section, more = _parts(section, where, f"{inner}.")
                parts |= of_section
                problems += more
            else:
                found = f"found {section!r}" if name in NAMES[kind] else f"unknown {kind.removeprefix('by_')}"
                problems.append(Problem(where[inner], found, expected, did_you_mean(name, NAMES[kind])))
    return parts, problems


def _leave_out_rate(values: dict[str, Any], where: dict[str, str], method: str, own: str, objective: str) -> str:
    """Leave out a learning rate that is for ``own``, the file's objective, if ``objective`` needs another one.

    Returns:
        A note that says so; empty if there was nothing to leave out.
    """
    rates = DECLARED[objective].learning_rates
    if values.get("learning_rate") is None or DECLARED[own].learning_rates == rates:
        return ""
    rate = values.pop("learning_rate")
    return (
        f"note: {where['learning_rate']}: {rate} is for {own}; {objective} uses its default of "
        f"{rates[method != 'full']:.0e} (another: --learning_rate, or {BY_OBJECTIVE} in the file)"
    )


def _relative_to(folder: Path, value: Any) -> Any:
    """Put ``folder`` in front of a path, or of each path in a list, if the file exists there."""
    if isinstance(value, list):
        return [_relative_to(folder, item) for item in value]
    if isinstance(value, dict):
        return value | {"path": _relative_to(folder, value["path"])} if "path" in value else value
    if not isinstance(value, str) or not value:
        return value
    # `glob` refuses an absolute pattern.
    matches = os.path.exists(folder / value) or (not os.path.isabs(value) and any(folder.glob(value)))
    return str(folder / value) if matches else value


def _parse_yaml(path: Path, loader_class: Any) -> tuple[dict[str, Any], dict[str, int], list[Problem]]:
    """Return values and lines of the top-level keys, and a problem for each key given twice, at any depth."""
    shown = _shown_path(path)
    try:
        text = read_small(path, MAX_BYTES)
        loader = loader_class(text)
        node = loader.get_single_node()
        if node is None:
            return {}, {}, []
        if not isinstance(node, yaml.MappingNode):
            raise UserError(shown, f"holds a {node.id}", "key: value lines")
        values = {key.value: loader.construct_object(value, deep=True) for key, value in node.value}
        return values, *_lines(node, shown)
    # PyYAML does not catch what date() raises for 2024-13-45, int() for !!int x, or dict() for a list as a key.
    except (OSError, yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}" if mark else shown
        reason = getattr(error, "strerror", None) or getattr(error, "problem", None) or first_line(error)
        raise UserError(where, f"cannot be read as YAML ({reason})", "key: value lines") from None


def _lines(node: yaml.Node, shown: str, name: str = "") -> tuple[dict[str, int], list[Problem]]:
    """The line of each key under ``name``, as ``by_method.lora.seed``, and a problem for each that is given twice."""
    lines: dict[str, int] = {}
    problems = []
    inner = [(name, each) for each in node.value] if isinstance(node, yaml.SequenceNode) else []
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        full, line = f"{name}.{key.value}".lstrip("."), key.start_mark.line + 1
        if full in lines:
            fix = f"keep one: the first is on line {lines[full]}"
            problems.append(Problem(f"{shown}:{line} {key.value}", "duplicate key", fix=fix))
        lines.setdefault(full, line)
        inner.append((full, value))
    for full, each in inner:
        more, wrong = _lines(each, shown, full)
        lines |= more
        problems += wrong
    return lines, problems


def _shown_path(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
