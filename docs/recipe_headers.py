"""Writes the tables in the headers of the recipes, and those of docs/questions.md and README.md.

python docs/recipe_headers.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.config.hints import recipe_names
from kit.config.recipe import DEFAULT_RECIPE, RECIPES, Recipe
from kit.config.validation import load_recipe
from kit.memory.shape import Shape
from kit.tools.plan.headers import FEW_MACHINES, MACHINES, largest, renewed, row
from kit.tools.plan.models import find_shape

QUESTIONS = Path(__file__).with_name("questions.md")
README = Path(__file__).parents[1] / "README.md"


def recipes() -> dict[str, tuple[Recipe, Shape]]:
    """All recipes for a size of model, by name, with the shape of their model."""
    loaded = {name: load_recipe(name) for name in recipe_names() if not name.startswith(DEFAULT_RECIPE)}
    return {name: (recipe, find_shape(recipe.model_name_or_path)) for name, recipe in loaded.items()}


def pages() -> dict[Path, str]:
    """The text of each file as it should be."""
    known = recipes()
    found = {}
    for path in sorted({RECIPES / f"{name.rpartition('-')[0]}.yaml" for name in known}):
        rows = [row(*known[name]) for name in known if name.rpartition("-")[0] == path.stem]
        text = path.read_text(encoding="utf-8")
        found[path] = renewed(text, load_recipe(path.stem).method, [each for each in rows if each])
    for path, machines in {QUESTIONS: MACHINES, README: FEW_MACHINES}.items():
        before, begin, rest = path.read_text(encoding="utf-8").partition("<!-- table -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        found[path] = before + begin + "\n".join(["", *largest(known, machines), "", ""]) + end + after
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
