"""Read YAML files: the values, and the ``file:line`` of each key for messages.

Promises: nothing in a file is executed, and any mistake in it becomes a ``Problem`` with its line.

A recipe may hold ``by_method``, a mapping of methods to settings. Those of the method in use override the others of the
file. If it does, ``--recipe llama-8b-lora`` is short for ``--recipe llama-8b --method lora``.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kit.config.fields import json_or_string
from kit.config.hints import METHODS, hint_for_file, other_kind
from kit.config.recipe import RECIPES, Recipe
from kit.durable import read_small
from kit.errors import Problem, UserError, did_you_mean, raise_if

BY_METHOD = "by_method"

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
PATHS = ("model_name_or_path", "dataset", "eval_dataset", "chat_template", "adapter_name_or_path")


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
        hint = hint_for_file(name, kind)
        if kind == "recipe":
            hint = hint or "`kit recipes` lists them, most with a method: llama-8b-full, llama-8b-lora, llama-8b-qlora"
        raise UserError(Problem(f"--{kind}", found, f"a YAML file, or one of {', '.join(names)}", hint))
    return file


def _existing(name: str, folder: Path) -> Path | None:
    candidates = [Path(name), folder / name, folder / f"{name}.yaml"]
    return next((path for path in candidates if os.path.isfile(path)), None)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a YAML mapping. Returns its values, and the line of each top-level key, counted from 1.

    Raises:
        UserError: the file cannot be read, is not a YAML mapping, or has a key twice.
    """
    values, lines, problems = _parse_yaml(path, yaml.SafeLoader)
    raise_if(problems)
    return values, lines


@dataclass(frozen=True)
class RecipeFile:
    """What a recipe file says for one method."""

    name: str  # of the recipe: the stem of the file, with the method if the file depends on it
    values: dict[str, Any]
    where: dict[str, str]  # the ``file:line key`` of each value
    problems: list[Problem]  # keys given twice, and mistakes in ``by_method``


def read_recipe_file(name: str, method: str | None = None) -> RecipeFile:
    """Read a recipe file.

    All values stay strings, as the values of flags are, so that both are validated alike and YAML's own types do not
    matter: 1e-4 is a number, yes is not true, and the revision 0123 keeps its zero. (But ``chat_template_kwargs`` are
    read as JSON.) A relative path is looked for in the folder of the recipe first.

    Args:
        name: a path, a name in ``recipes/`` with or without ``.yaml``, or a name with a method: ``llama-8b-lora``.
        method: what the user asks for apart from ``name``; it wins.

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
    if problem := other_kind(values, "recipe", path):
        raise UserError(problem)
    shown = _shown_path(path)
    where = {key: f"{shown}:{line} {key}" for key, line in lines.items()}
    recipe_name = path.stem
    if BY_METHOD in values:
        method = method or of_name or values.get("method") or Recipe.model_fields["method"].default
        chosen, more = _section(values.pop(BY_METHOD), method, where)
        values |= {"method": method} | chosen
        where |= {key: where[f"{BY_METHOD}.{method}.{key}"] for key in chosen}
        problems += more
        recipe_name = f"{recipe_name}-{method}"
    elif of_name:
        find_file(name, RECIPES, "recipe")  # raises: the file does not depend on the method
    values = {key: None if value in ("", "~", "null") else value for key, value in values.items()}
    given = values.get("chat_template_kwargs")
    if isinstance(given, dict):  # to a template, false and "false" are different
        values["chat_template_kwargs"] = json_or_string(given)
    for key in PATHS:
        if key in values:
            values[key] = _relative_to(path.parent, values[key])
    return RecipeFile(recipe_name, values, where, problems)


def _section(sections: Any, method: str, where: dict[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """The settings of ``method`` in ``by_method``, and problems also with the methods that are not in use."""
    expected = f"{', '.join(METHODS)}, each with key: value lines"
    if not isinstance(sections, dict):
        return {}, [Problem(where[BY_METHOD], f"found {sections!r}", expected)]
    problems = []
    for name, values in sections.items():
        key = where.get(f"{BY_METHOD}.{name}", BY_METHOD)
        if name not in METHODS:
            problems.append(Problem(key, "not a method", expected, did_you_mean(name, METHODS)))
        elif not isinstance(values, dict):
            problems.append(Problem(key, f"found {values!r}", expected))
        elif name != method:  # the settings of the method in use are checked with all others
            for setting in values:
                if setting not in Recipe.model_fields:
                    hint = did_you_mean(setting, Recipe.model_fields)
                    problems.append(Problem(where[f"{BY_METHOD}.{name}.{setting}"], "unknown key", fix=hint))
    chosen = sections.get(method, {})
    return chosen if isinstance(chosen, dict) else {}, problems


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
        loader = loader_class(read_small(path, MAX_BYTES))
        node = loader.get_single_node()
        if node is None:
            return {}, {}, []
        if not isinstance(node, yaml.MappingNode):
            raise UserError(Problem(shown, f"holds a {node.id}", "key: value lines"))
        if problem := _too_many_values(node, shown):
            raise UserError(problem)
        values = {key.value: loader.construct_object(value, deep=True) for key, value in node.value}
        return values, _lines(node), _duplicates(node, shown)
    except UnicodeDecodeError as error:
        raise UserError(Problem(shown, f"not UTF-8 at byte {error.start}", "a YAML text file")) from None
    except OSError as error:
        raise UserError(Problem(shown, error.strerror or "cannot be read", "a YAML text file")) from None
    except RecursionError:
        raise UserError(Problem(shown, "nested too deeply", "key: value lines")) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}" if mark else shown
        found = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(Problem(where, f"not valid YAML ({found})", "key: value lines")) from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        # PyYAML does not catch what date() raises for 2024-13-45, int() for !!int x, or dict() for a list as a key.
        raise UserError(Problem(shown, f"not valid YAML ({error})", "key: value lines")) from None


def _too_many_values(node: yaml.Node, shown: str) -> Problem | None:
    """The problem of aliases that multiply: ten lines of nested aliases would give a billion values.

    Each value counts as often as it is named, since whatever reads the values visits it as often.
    """
    num_values = 0
    nodes = [node]
    while nodes:
        node = nodes.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            found = f"more than {MAX_VALUES} values; one that an alias (*name) repeats counts each time"
            return Problem(shown, found, f"at most {MAX_VALUES}")
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            nodes += [part for pair in node.value for part in pair]
    return None


def _lines(node: yaml.MappingNode, prefix: str = "") -> dict[str, int]:
    """The line of each top-level key, and of those within ``by_method`` as ``by_method.lora.learning_rate``."""
    lines = {}
    for key, value in reversed(node.value):
        name = f"{prefix}{key.value}"
        lines[name] = key.start_mark.line + 1
        if name.startswith(BY_METHOD) and name.count(".") < 2 and isinstance(value, yaml.MappingNode):
            lines |= _lines(value, f"{name}.")
    return lines


def _duplicates(node: yaml.Node, shown: str) -> list[Problem]:
    problems = []
    nodes = [node]
    visited: set[int] = set()
    while nodes:
        node = nodes.pop()
        if id(node) in visited:  # an alias; without this check, ten lines of nested aliases give a billion nodes
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            nodes += [value for _, value in node.value]
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if key.value in lines:
                    fix = f"keep one: the first is in line {lines[key.value]}"
                    problems.append(Problem(f"{shown}:{line} {key.value}", "given a second time", fix=fix))
                lines.setdefault(key.value, line)
    return problems


def _shown_path(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
