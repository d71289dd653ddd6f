"""Model folders with tied and untied embeddings, and three checkpoints of an adapter."""

import shutil

import pytest
from checkpoint_helpers import build, save_checkpoint, train
from helpers import make_model


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory):
    return {"untied": model_folder, "tied": make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)}


@pytest.fixture(scope="module")
def three(folders, tmp_path_factory):
    """The model, its optimiser, and the folder with checkpoints of steps 1 to 3: to be copied, not changed."""
    model, optimizer = build(folders["untied"], method="lora", lora_r=2)
    folder = tmp_path_factory.mktemp("three") / "checkpoints"
    train(model, optimizer, [0])
    for step in (1, 2, 3):
        save_checkpoint(model, optimizer, folder, {"step": step}, limit=0)
    return model, optimizer, folder


@pytest.fixture
def saved(three, tmp_path):
    """Checkpoints of steps 1 to 3, and a function that saves one more."""
    model, optimizer, original = three
    folder = shutil.copytree(original, tmp_path / "checkpoints")

    def save(step, limit=0, best_step=None):
        return save_checkpoint(model, optimizer, folder, {"step": step}, limit, best_step)

    return folder, save
