"""Validate the values of recipe files and flags. All problems are reported together, with flag or ``file:line``."""

import re
import reprlib
import shlex
from collections.abc import Container, Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kit.config.conflicts import find_conflicts
from kit.config.dataset_entry import DatasetEntry
from kit.config.hints import hint_for_value
from kit.config.launch_flags import Launch
from kit.config.other_kits import hint_for_other_key
from kit.config.recipe import Recipe
from kit.schema.fields import choices, expected, is_optional
from kit.system.credentials import redacted
from kit.system.errors import Problem, did_you_mean

FLAGS = Launch.model_fields | Recipe.model_fields
NAME = "NAME"  # in a fix, what only the user knows

# Shortens a value for a message, since a file may hold a value of any length.
_short = reprlib.Repr()
_short.maxlevel = 2
_short.maxstring = 80

Model = TypeVar("Model", bound=BaseModel)


def check_recipe(
    values: dict[str, Any], where: dict[str, str], uncertain: Iterable[str] = ()
) -> tuple[Recipe | None, list[Problem]]:
    """Validate a recipe: its values, unknown keys, and conflicts between settings.

    Args:
        where: what to call each key in a message, such as ``file:line key``.
        uncertain: keys whose value is unknown because of an earlier problem; their absence is not reported.

    Returns:
        The recipe, or None if a value is wrong; and all problems.
    """
    unknown = [_unknown(key, where[key], value) for key, value in values.items() if key not in Recipe.model_fields]
    # If `datset: x` gets the hint `dataset`, then "dataset is missing" must not be reported as well.
    uncertain = set(uncertain).union(*(re.findall(r"\w+", problem.fix) for problem in unknown))
    known = {key: value for key, value in values.items() if key in Recipe.model_fields}
    recipe, problems, wrong = validate(Recipe, known, where, uncertain)
    problems += find_conflicts(recipe, where, uncertain | wrong)
    return None if wrong else recipe, unknown + problems


def validate(
    model: type[Model], values: dict[str, Any], where: dict[str, str], uncertain: Container[str] = ()
) -> tuple[Model, list[Problem], set[str]]:
    """Validate ``values`` as fields of ``model``.

    Args:
        where: what to call each field in a message.
        uncertain: fields whose absence is not reported.

    Returns:
        An instance made from the valid values, a problem for each other field, and the names of these fields.
    """
    values = {name: _as_none(model, name, value) for name, value in values.items()}
    try:
        return model.model_validate(values), [], set()
    except ValidationError as error:
        # pydantic reports each member of a union and each item of a list. Keep one error per field: the most nested.
        items = sorted(error.errors(include_url=False), key=lambda item: -len(item["loc"]))
        first = {str(item["loc"][0]): item for item in reversed(items)}
    problems = []
    for name in [name for name in model.model_fields if name in first]:
        info, item = model.model_fields[name], first[name]
        if item["type"] == "missing" and len(item["loc"]) == 1:
            if name not in uncertain:
                problems.append(Problem(name, "missing", info.description or "", f"--{name} {NAME}"))
            continue
        if any(isinstance(step, int) for step in item["loc"]) and isinstance(values[name], str | list):
            inner = _inside_entry(where.get(name, name), item)
            if inner:
                problems.append(inner)
                continue
        is_blank = values[name] is None or not str(values[name]).strip()
        found = "no value" if is_blank else f"found {_short.repr(values[name])}"
        problems.append(Problem(where.get(name, name), found, expected(info), _hint_for_value(name, info, item)))
    right = {name: value for name, value in values.items() if name not in first}
    stand_in = {name: "?" for name, info in model.model_fields.items() if info.is_required()}
    return model.model_validate(stand_in | right), problems, set(first)


def _hint_for_value(name: str, info: FieldInfo, item: Any) -> str:
    """A value that the user may have meant; empty if none is likely. ``item``: the error of pydantic."""
    value = item["input"]
    if not isinstance(value, str):
        return ""
    if value and not value.strip() and is_optional(info):
        return "leave it out"
    return hint_for_value(name, value) or did_you_mean(value, choices(info.annotation))


def _inside_entry(shown: str, item: Any) -> Problem | None:
    """The problem of one entry in a list of datasets; None if ``item`` is an error in another list."""
    loc, fields = item["loc"], DatasetEntry.model_fields
    if not any("DatasetEntry" in str(step) for step in loc):
        return None
    number, *keys = loc[next(i for i, step in enumerate(loc) if isinstance(step, int)) :]
    where = f"{shown}[{number}]" + (f".{keys[0]}" if keys else "")
    if not keys or keys[0] not in fields:
        found = "unknown key" if keys else f"found {_short.repr(item['input'])}"
        return Problem(where, found, ", ".join(fields), did_you_mean(str(keys[0]), fields) if keys else "")
    found = "missing" if item["type"] == "missing" else f"found {_short.repr(item['input'])}"
    if item["type"] == "value_error" and (reason := str(item["ctx"]["error"])):
        found += f", which has {reason}"
    return Problem(where, found, expected(fields[keys[0]]))


def _as_none(model: type[BaseModel], name: str, value: Any) -> Any:
    """Read ``none``, ``null`` and ``~`` as None, or as an empty list or mapping, if the field allows it."""
    is_null = value is None or (isinstance(value, str) and value.strip().lower() in ("~", "null", "none"))
    if not is_null:
        return value
    info = model.model_fields[name]
    if info.default in ([], {}):
        return info.default
    return None if is_optional(info) else value


def problems_with_secrets(values: dict[str, Any], where: dict[str, str]) -> list[Problem]:
    """Return a problem for each setting that holds a credential.

    A run stores its settings next to the model, and models are shared.
    """
    fix = "remove it: the hub and the trackers read credentials from the environment"
    problems = []
    for key, value in values.items():
        for string in _strings(value):
            if redacted(string) != string:
                found = f"a credential in {redacted(string)!r}"
                problems.append(Problem(where.get(key, key), found, "no credential: a run stores its settings", fix))
    return problems


def _strings(value: Any) -> Iterator[str]:
    """All strings in a YAML value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _unknown(name: str, where: str, value: Any) -> Problem:
    is_flag = where.startswith("--")
    if hint := hint_for_other_key(name, value or True if is_flag else value):  # a flag without a value is a switch
        return Problem(where, "not a setting of this kit", fix=hint)
    if name in Launch.model_fields:
        return Problem(
            where, "a flag, not a key of a recipe", fix=f"remove it, and type --{name} {shlex.quote(str(value))}"
        )
    hint = did_you_mean(name, FLAGS if is_flag else Recipe.model_fields)
    return Problem(where, "unknown flag" if is_flag else "unknown key", fix=hint or "--help lists all")
