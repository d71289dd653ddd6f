"""Recipes on the small model, copies of its folder with a mistake, and an adapter of it."""

import json
import shutil

import pytest
from helpers import make_model
from model_helpers import FP32, TEMPLATE, build

from kit.config.recipe import Recipe
from kit.model.pretrained.tokenizer import open_tokenizer


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A model whose head is its embedding."""
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture
def recipe(model_folder):
    def recipe(folder=model_folder, **changes):
        return Recipe(**{"model_name_or_path": str(folder), "dataset": "x.jsonl", "max_length": 256, **changes})

    return recipe


@pytest.fixture
def changed(model_folder, tmp_path):
    """A copy of the model's folder, with other values in one of its JSON files."""

    def changed(file="config.json", **values):
        folder = tmp_path / "changed"
        if not folder.exists():
            shutil.copytree(model_folder, folder)
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    return changed


@pytest.fixture
def adapter(recipe, tmp_path):
    """A saved LoRA of rank 3, with other settings where given."""

    def adapter(**settings):
        build(recipe(lora_r=3, **settings), FP32).save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return adapter


@pytest.fixture
def with_template(recipe, adapter):
    """An adapter's folder, as a run leaves it."""
    folder = adapter()
    tokenizer = open_tokenizer(recipe())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
