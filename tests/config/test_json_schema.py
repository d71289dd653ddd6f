"""The schema that editors use is that of the settings, and every recipe names it."""

import json

from kit.config.json_schema import FIRST_LINE, SCHEMA_FILE, json_schema
from kit.config.recipe import RECIPES
from kit.config.recipe_file import read_yaml

FILES = sorted(RECIPES.glob("*.yaml"))


def test_the_shipped_schema_is_current():
    """Else: python -m kit.cli.main recipes --schema > recipes/recipe.schema.json"""
    assert json.loads((RECIPES / SCHEMA_FILE).read_text()) == json_schema()


def test_every_recipe_names_it_and_fits_it():
    for path in FILES:
        assert path.read_text().splitlines()[0] == FIRST_LINE, path
        values, _ = read_yaml(path)
        properties = json_schema()["properties"]
        assert set(values) <= set(properties), path
        for name, value in values.items():
            choices = properties[name].get("enum")
            assert not choices or value in choices, path
