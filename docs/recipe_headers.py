"""Writes the tables in the headers of the recipes.

python docs/recipe_headers.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.config.hints import recipe_names
from kit.config.recipe import RECIPES
from kit.config.validation import load_recipe
from kit.plan.headers import Row, renewed, row
from kit.plan.models import find_shape


def rows(path: Path) -> list[Row]:
    """The rows of the table of one recipe file."""
    recipes = [load_recipe(name) for name in recipe_names() if name.rpartition("-")[0] == path.stem]
    found = [row(recipe, find_shape(recipe.model_name_or_path)) for recipe in recipes]
    return [each for each in found if each]


def main() -> None:
    """Rewrite the tables."""
    for path in sorted(RECIPES.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if "\nby_method:" in text:
            path.write_text(renewed(text, load_recipe(path.stem).method, rows(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
