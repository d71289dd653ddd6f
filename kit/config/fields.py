"""How a setting is declared and described: one field gives the YAML key, the flag, the help and the validation."""

from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Lt
from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo


def option(group: str, default: Any, meaning: str, unit: str = "", *, expected: str = "", **limits: Any) -> Any:
    """A field of the schema.

    Args:
        group: heading in ``--help``.
        default: ``...`` where the user must give a value.
        meaning: one line for ``--help``.
        unit: of the value, such as ``tokens``.
        expected: what the field takes, where the type alone does not say it well.
        limits: pydantic's own, such as ``ge``.
    """
    extra: Any = {"group": group, "unit": unit, "expected": expected}
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


SHARE_OR_COUNT = "whole number, or share below 1,"


# Text is stripped, and never empty: `--dataset "$UNSET"` is a mistake.
STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True, str_min_length=1)


def comma_separated(value: Any) -> Any:
    """``a, b`` as a list; anything but text as it is."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def column_mapping(value: Any) -> Any:
    """``theirs=ours,theirs=ours`` as a mapping; text that is none stays text, and is refused as such."""
    if not isinstance(value, str):
        return value
    pairs = [tuple(part.strip() for part in pair.split("=")) for pair in value.split(",")]
    columns = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    return columns if len(columns) == len(pairs) else value


def dataset_entries(value: Any) -> Any:
    """Data sets as a user names them: one name stays text; several, by commas or as a YAML list, become entries."""
    if isinstance(value, str):
        if not value.startswith("["):
            return value if "," not in value else [{"path": path} for path in comma_separated(value)]
        try:
            value = yaml.load(value, yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise ValueError from error
    if not isinstance(value, list):
        return value
    return [{"path": item} if isinstance(item, str) else item for item in value]


def module_names(value: Any) -> Any:
    """``all-linear``, or names of modules separated by commas."""
    return value if value == "all-linear" else comma_separated(value)


def share_or_count(value: float) -> float:
    """Refuse a fraction above 1: below 1 it is a share, from 1 on a count."""
    if value >= 1 and value % 1:
        raise ValueError
    return value


def expected(info: FieldInfo) -> str:
    """What a field takes, as help and messages say it: ``whole number from 1``."""
    extra: Any = info.json_schema_extra
    words = extra["expected"] or _type_name(info.annotation)
    for limit in info.metadata:
        match limit:
            case Ge(ge=least):
                words += f" from {least}"
            case Gt(gt=bound):
                words += f" above {bound}"
            case Lt(lt=bound):
                words += f" below {bound}"
    return words


def choices(annotation: Any) -> list[str]:
    """The words an annotation allows, if it lists them."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for member in get_args(annotation) for word in choices(member)]


def is_optional(info: FieldInfo) -> bool:
    """Whether the field takes None."""
    return NoneType in get_args(info.annotation)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if members := [member for member in get_args(annotation) if member is not NoneType]:
        return " | ".join(_type_name(member) for member in members)
    return {int: "whole number", float: "number", str: "text", bool: "true | false"}[annotation]
