"""The schema that editors use is that of the settings, and every recipe names it."""

import json

from kit.config.json_schema import FIRST_LINE, SCHEMA_FILE, json_schema
from kit.config.recipe import RECIPES, Recipe
from kit.config.recipe_file import read_yaml

FILES = sorted(RECIPES.glob("*.yaml"))


def test_the_shipped_schema_is_current():
    """Else: python -m kit.cli.main recipes --schema > recipes/recipe.schema.json"""
    assert json.loads((RECIPES / SCHEMA_FILE).read_text()) == json_schema()


def test_every_setting_is_in_it_with_its_meaning_unit_and_default():
    schema = json_schema()
    assert list(schema["properties"]) == [*Recipe.model_fields, "by_method", "by_objective"]
    assert "required" not in schema
    assert schema["additionalProperties"] is False  # an editor underlines a mistyped key
    steps = schema["properties"]["warmup_steps"]
    assert steps["description"] == "Optimisation: linear warm-up; below 1 a share of all steps [steps]"
    assert (steps["type"], steps["minimum"], steps["default"]) == ("number", 0, 0.03)
    assert schema["properties"]["method"]["enum"] == ["full", "lora", "qlora"]
    sections = schema["properties"]["by_method"]["properties"]
    assert list(sections) == ["full", "lora", "qlora"] and sections["lora"] == {"$ref": "#"}  # a recipe again
    assert {member.get("type") for member in schema["properties"]["report_to"]["anyOf"]} >= {"string", "array"}


def test_every_recipe_names_it_and_fits_it():
    for path in FILES:
        assert path.read_text().splitlines()[0] == FIRST_LINE, path
        values, _ = read_yaml(path)
        properties = json_schema()["properties"]
        assert set(values) <= set(properties), path
        for name, value in values.items():
            choices = properties[name].get("enum")
            assert not choices or value in choices, path
