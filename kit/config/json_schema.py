"""The JSON schema of a recipe file, for editors.

Promises: the schema accepts what the kit accepts, except booleans other than ``true`` and ``false`` (the kit also reads
``yes``). Rules between settings are not part of it. Sections of other methods and objectives are checked too.
"""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit

from kit.config.hints import METHODS, OBJECTIVES
from kit.config.recipe import Recipe
from kit.config.recipe_file import BY_METHOD, BY_OBJECTIVE
from kit.scoring.own_metric import PATTERN

_SCALAR = {"type": ["string", "number", "boolean"]}  # where the kit expects a string, 0123 and true are strings
_NULL = {"enum": [None, "none"]}
_NUMBER = {"type": "string", "pattern": r"^[-+]?[0-9._]+([eE][-+]?[0-9]+)?$"}  # in YAML 1.1, 1e-4 is a string
# pydantic leaves these names where a limit follows a validator.
_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 7) of a recipe file, with ``by_method`` and ``by_objective``."""
    schema = Recipe.model_json_schema(schema_generator=_OfFile)
    entry = schema["$defs"]["DatasetEntry"]
    entry["properties"] = {name: _setting(each) for name, each in entry["properties"].items()}
    settings = {name: _setting(each) for name, each in schema["properties"].items()}

    section = [name for name in settings if name != "method"]
    of_objective = [name for name in section if name != "objective"]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of the kit",
        **_mapping(
            settings
            | {
                BY_METHOD: _mapping({name: {"$ref": "#/$defs/method"} for name in METHODS}),
                BY_OBJECTIVE: _mapping({name: {"$ref": "#/$defs/objective"} for name in OBJECTIVES}),
            }
        ),
        "$defs": {
            "DatasetEntry": entry,
            "method": _mapping({name: {"$ref": f"#/properties/{name}"} for name in [*section, BY_OBJECTIVE]}),
            "objective": _mapping({name: {"$ref": f"#/properties/{name}"} for name in of_objective}),
        },
    }


def _mapping(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


class _OfFile(GenerateJsonSchema):
    """Writes the schema of what a recipe file may hold, where any value may be a string, and no value is code."""

    def int_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [super().int_schema(schema), _NUMBER]}

    def float_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [super().float_schema(schema), _NUMBER]}

    def str_schema(self, schema: Any) -> dict[str, Any]:
        if schema.get("pattern") == f"^{PATTERN}$":
            raise PydanticOmit  # code: the command line only
        return super().str_schema(schema) | _SCALAR

    def list_schema(self, schema: Any) -> dict[str, Any]:
        listed = super().list_schema(schema)
        items = listed["items"].get("anyOf", [listed["items"]])
        if "$ref" in items[0]:  # a dataset, which may be its path alone
            items.append(_SCALAR)
        return {"anyOf": [{**listed, "items": {"anyOf": items}}, _SCALAR]}

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [super().dict_schema(schema), _SCALAR]}


def _setting(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one setting with its unit in the description, and without the kit's own keys."""
    schema = _rewritten(schema)
    unit, default = schema.pop("unit"), schema.get("default")
    for key in ("title", "group", "expected", "identity", "needs"):
        del schema[key]
    schema["description"] += f" [{unit}]" if unit else ""
    if default in ([], {}):
        schema["anyOf"] = [*schema["anyOf"], _NULL]
    return schema


def _rewritten(schema: Any) -> Any:
    """Return a schema with the names of JSON schema for limits, and with ``none`` where null is allowed."""
    if schema == {"type": "null"}:
        return _NULL
    if isinstance(schema, list):
        return [_rewritten(each) for each in schema]
    if isinstance(schema, dict):
        return {_LIMITS.get(key, key): _rewritten(each) for key, each in schema.items()}
    return schema
