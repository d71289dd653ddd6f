"""The JSON schema of a recipe, from which editors complete and check recipe files: made from the settings themselves.

``recipes/recipe.schema.json`` is what ``kit recipes --schema`` prints. Each recipe names it in its first line.
"""

from typing import Any

from kit.config.recipe import Recipe
from kit.config.recipe_file import NAMES

SCHEMA_FILE = "recipe.schema.json"  # in recipes/
FIRST_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}"  # of a recipe beside it


def json_schema() -> dict[str, Any]:
    """Return the schema. No key is required, because flags may give what the file leaves out."""
    schema = Recipe.model_json_schema()
    del schema["required"]
    for part in (schema, *schema["$defs"].values()):
        part["properties"] = {name: _described(value) for name, value in part["properties"].items()}
    # A recipe may not name code.
    names_of_metrics = next(each for each in schema["properties"]["metrics"]["anyOf"] if each.get("type") == "array")
    names_of_metrics["items"] = next(each for each in names_of_metrics["items"]["anyOf"] if "enum" in each)
    for key, names in NAMES.items():
        schema["properties"][key] = {
            "description": f"Settings that depend on the {key.removeprefix('by_')}; they override those of the file",
            "type": "object",
            "properties": {name: {"$ref": "#"} for name in names},
            "additionalProperties": False,
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Recipe"}


def _described(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a setting in an editor's words: unit and meaning as the description, lists also as a string."""
    unit = f" [{field['unit']}]" if field.get("unit") else ""
    description = f"{field.get('group', '')}: {field.get('description', '')}{unit}"
    default = {"default": field["default"]} if "default" in field else {}
    meta = ("expected", "group", "unit", "identity", "needs", "title", "description", "default")
    types = {key: value for key, value in field.items() if key not in meta}
    members = types.pop("anyOf", [types])
    is_list = any(member.get("type") in ("array", "object") for member in members)
    if is_list and {"type": "string"} not in members:
        members = [*members, {"type": "string"}]
    allowed = members[0] if len(members) == 1 else {"anyOf": members}
    return {"description": description, **default, **allowed}
