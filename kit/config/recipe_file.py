"""Read YAML files: the values, and the ``file:line`` of each key for messages.

Promises: nothing in a file is executed, and any mistake in it becomes a ``Problem`` with its line.
"""

import os
from pathlib import Path
from typing import Any

import yaml

from kit.config.fields import json_or_text
from kit.config.hints import hint_for_file, other_kind
from kit.errors import Problem, UserError, raise_if

PATHS = ("model_name_or_path", "dataset", "eval_dataset", "chat_template", "adapter_name_or_path")


def find_file(name: str, folder: Path, kind: str) -> Path:
    """Find a YAML file: ``name`` is a path, or a name in ``folder`` with or without ``.yaml``.

    Args:
        kind: the name of the flag, for the message.

    Raises:
        UserError: there is no such file.
    """
    candidates = [Path(name), folder / name, folder / f"{name}.yaml"]
    file = next((path for path in candidates if os.path.isfile(path)), None)
    if file is None:
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        found = f"{name!r} is a folder" if os.path.isdir(name) else f"no {kind} {name!r}"
        raise UserError(
            Problem(f"--{kind}", found, f"a YAML file, or one of {', '.join(names)}", hint_for_file(name, kind))
        )
    return file


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a YAML mapping. Returns its values, and the line of each top-level key, counted from 1.

    Raises:
        UserError: the file cannot be read, is not a YAML mapping, or has a key twice.
    """
    values, lines, problems = _parse_yaml(path, yaml.SafeLoader)
    raise_if(problems)
    return values, lines


def read_recipe_file(path: Path) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Read a recipe file.

    All values stay text, as the values of flags are, so that both are validated alike and YAML's own types do not
    matter: 1e-4 is a number, yes is not true, and the revision 0123 keeps its zero. (But ``chat_template_kwargs`` are
    read as JSON.) A relative path is looked for in the folder of the recipe first.

    Returns:
        The values, the ``file:line`` of each key, and a problem for each key given twice.

    Raises:
        UserError: the file cannot be read, is not a YAML mapping, or is an Accelerate config.
    """
    values, lines, problems = _parse_yaml(path, yaml.BaseLoader)
    if problem := other_kind(values, "recipe", path):
        raise UserError(problem)
    values = {key: None if value in ("", "~", "null") else value for key, value in values.items()}
    given = values.get("chat_template_kwargs")
    if isinstance(given, dict):  # a template tells false from "false"
        values["chat_template_kwargs"] = json_or_text(given)
    for key in PATHS:
        values |= {key: _relative_to(path.parent, values[key])} if key in values else {}
    return values, {key: f"{_shown_path(path)}:{line} {key}" for key, line in lines.items()}, problems


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
        loader = loader_class(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return {}, {}, []
        if not isinstance(node, yaml.MappingNode):
            raise UserError(Problem(shown, f"holds a {node.id}", "key: value lines"))
        values = {key.value: loader.construct_object(value, deep=True) for key, value in node.value}
        lines = {key.value: key.start_mark.line + 1 for key, _ in reversed(node.value)}
        return values, lines, _duplicates(node, shown)
    except UnicodeDecodeError as error:
        raise UserError(Problem(shown, f"not UTF-8 at byte {error.start}", "a YAML text file")) from None
    except OSError as error:
        raise UserError(Problem(shown, error.strerror or "cannot be read")) from None
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


def _duplicates(node: yaml.Node, shown: str) -> list[Problem]:
    problems = []
    nodes, visited = [node], set()
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
                    where, first = f"{shown}:{line} {key.value}", f"the first is in line {lines[key.value]}"
                    problems.append(Problem(where, "given a second time", fix=f"keep one: {first}"))
                lines.setdefault(key.value, line)
    return problems


def _shown_path(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
