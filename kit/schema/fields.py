"""How a setting is declared: one field gives the YAML key, the flag, the help and the validation."""

import json
import os
import re
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo

from kit.system.durable import read_small


def option(
    group: str,
    default: Any,
    meaning: str,
    unit: str = "",
    *,
    expected: str = "",
    identity: bool = False,
    needs: str = "",
    **limits: Any,
) -> Any:
    """Declare a field of the schema.

    Args:
        group: heading in ``--help``.
        default: ``...`` if the user must give a value.
        meaning: one line for ``--help``.
        unit: unit of the value, such as ``tokens``.
        expected: describes the allowed values in messages, if the type does not describe them well.
        needs: what must be set so that this has an effect: names of settings with ``or`` between them, each true or,
            as in ``method lora``, of that value (``none``: not set). With ``and`` between such needs, each must be met.
        identity: whether another value of this setting makes it another run.
        limits: limits of pydantic, such as ``ge``.
    """
    extra: Any = {"group": group, "unit": unit, "expected": expected, "identity": identity, "needs": needs}
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


SERVER: Any = {"expected": "http://HOST:PORT", "pattern": r"^https?://[^\s/@?#]+/?$"}  # of an option
FRACTION_OR_COUNT = "whole number, or fraction below 1,"
# Strings are stripped and must not be empty: `--dataset "$UNSET"` is a mistake.
STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True, str_min_length=1)


def comma_separated(value: Any) -> Any:
    """Split the string ``a, b`` into a list; return any other value as it is."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def column_mapping(value: Any) -> Any:
    """Parse ``column=field,column=field``, or a JSON object, into a mapping of columns to the kit's fields.

    Each field is read as JSON if it is that. A string of any other form is returned as it is, and validation then
    refuses it; so is what is no string.
    """
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):  # also for names with a comma or an equals sign
        return json_or_string(value)
    pairs = [[part.strip() for part in pair.split("=", 1)] for pair in value.split(",")]
    found = {pair[0]: json_or_string(pair[1]) for pair in pairs if len(pair) == 2}
    return found if len(found) == len(pairs) else value


TEMPLATE_KWARGS = "name=value, separated by commas, or a JSON object"
# How Python writes them. As strings, a template would take each of them for true.
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def template_kwargs(value: Any) -> Any:
    """Parse a JSON object, or ``name=value,name=value`` where each value is JSON or a string, into a mapping.

    What is neither, or has a name that no template can read, is returned as a string, which validation then refuses.
    """
    given = column_mapping(value)
    if given is None:
        return None
    fits = isinstance(given, dict) and all(name.isidentifier() and item is not None for name, item in given.items())
    try:
        json.dumps(given, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        fits = False
    return given if fits else str(value)


def json_or_string(value: Any) -> Any:
    """Parse a string that is JSON, or True, False or None as in Python; another string stays as it is.

    Does so for each item of a list or dict.
    """
    if isinstance(value, dict):
        return {key: json_or_string(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_or_string(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        return json.loads(PYTHON_WORDS.get(value, value))
    except (ValueError, RecursionError):
        return value


def dataset_entries(value: Any) -> Any:
    """Parse the value of ``dataset``: one name stays a string; names with commas, or a YAML list, become entries."""
    if isinstance(value, str) and not value.startswith("["):
        paths = comma_separated(value)
        return [{"path": path} for path in paths] if "," in value else value
    if isinstance(value, str):
        try:
            value = yaml.load(value, yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise ValueError from error
    if not isinstance(value, list):
        return value
    return [{"path": item} if isinstance(item, str) else item for item in value]


TOKENS = "tokens separated by commas, or a file with one token a line"


def token_list(value: Any) -> Any:
    """Read a list of tokens: from a file with one a line if ``value`` names one; else they are separated by commas.

    Raises ``ValueError`` if ``value`` looks like the name of a file and there is none, or if the file cannot be read.
    """
    if not isinstance(value, str):
        return value
    if os.path.isfile(value):
        try:
            lines = read_small(value).splitlines()
        except OSError as error:
            raise ValueError from error
        return [line.strip() for line in lines if line.strip()]
    if re.fullmatch(r"[^<>\[\]{}|,]+\.\w{1,5}", value.strip()):
        raise ValueError
    return comma_separated(value)


def fraction_or_count(value: float | None) -> float | None:
    """Validate a number that is a fraction below 1, and a count from 1 on. Raises ``ValueError`` for a count of 1.5."""
    if value is not None and value >= 1 and value % 1:
        raise ValueError
    return value


def expected(info: FieldInfo) -> str:
    """Describe the allowed values of a field, for help and messages: ``whole number from 1``."""
    extra: Any = info.json_schema_extra
    text = extra["expected"] or _type_name(info.annotation)
    for limit in info.metadata:
        match limit:
            case Ge(ge=least):
                text += f" from {least}"
            case Gt(gt=bound):
                text += f" above {bound}"
            case Le(le=most):
                text += f" up to {most}"
            case Lt(lt=bound):
                text += f" below {bound}"
    return text


def choices(annotation: Any) -> list[str]:
    """Return the values that an annotation lists in a ``Literal``; an empty list if it has none."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for member in get_args(annotation) for word in choices(member)]


def is_identity(info: FieldInfo) -> bool:
    """Return whether the field is part of the identity of a run."""
    extra: Any = info.json_schema_extra
    return bool(extra["identity"])


def is_optional(info: FieldInfo) -> bool:
    """Return whether the field may be None."""
    return NoneType in get_args(info.annotation)


def is_switch(info: FieldInfo) -> bool:
    """Return whether the flag of the field may be given without a value, which then is true."""
    return info.annotation is bool or bool in get_args(info.annotation)


def is_list(info: FieldInfo) -> bool:
    """Return whether the field may hold several values: a list, or a mapping."""
    return any(get_origin(member) in (list, dict) for member in _members(info.annotation))


def _members(annotation: Any) -> list[Any]:
    """The types that a union or an annotated type stands for."""
    inner = [member for member in get_args(annotation) if get_origin(annotation) not in (list, dict, Literal)]
    if get_origin(annotation) is Annotated:
        inner = inner[:1]
    return [annotation, *(each for member in inner for each in _members(member))]


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        names = get_args(annotation)
        return (" | " if len(names) <= 12 else "|").join(names)  # a line of help has 120 characters
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if members := [member for member in get_args(annotation) if member is not NoneType]:
        return " | ".join(_type_name(member) for member in members)
    return {int: "whole number", float: "number", str: "string", bool: "true | false"}[annotation]
