"""Recipes that write to ``out``, and the checkpoints a run leaves there."""

import json

import pytest
from helpers import forge

from kit.config.recipe import Recipe
from kit.run.identity import identity


@pytest.fixture
def recipe(tmp_path):
    def recipe(**changes):
        return Recipe(
            **{"model_name_or_path": "model", "dataset": "train.jsonl", "output_dir": str(tmp_path / "out"), **changes}
        )

    return recipe


@pytest.fixture
def checkpoint_of():
    """Writes a whole checkpoint of a recipe's run, without weights."""

    def checkpoint_of(recipe, folder, step, **more):
        path = folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        about = {"identity": identity(recipe, "abc", "base"), "strategy": {"num_processes": 1}, "versions": {}, **more}
        manifest = {"format": 1, "step": step, **about, "files": {"state.json": {}}}
        (path / "manifest.json").write_text(json.dumps(manifest))
        forge(path, {"step": step, "optimizer_scalars": {}})
        return path

    return checkpoint_of
