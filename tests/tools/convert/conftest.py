"""Files of other kits, made here from the keys that their documentation has."""

import pytest
import yaml

from kit.config.command_line import read_recipe
from kit.tools.convert.convert import convert
from kit.tools.convert.write import recipe_text


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Writes a file with these values, converts it, and returns the recipe as a run would read it."""
    monkeypatch.chdir(tmp_path)

    def converted(values, num_processes=None, drop=(), flags=None, name="theirs.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
        result = convert(path, num_processes, drop, flags)
        recipe = tmp_path / "ours.yaml"
        recipe.write_text(recipe_text(result, ["made by a test"]))
        return result, read_recipe(["--recipe", str(recipe)])

    return converted
