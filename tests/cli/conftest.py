"""Commands as a user types them: on a small model and its data, or on another script than the kit's."""

import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from data_helpers import chat, write
from helpers import make_model


@pytest.fixture(autouse=True)
def environment():
    """A command sets variables for the libraries that it imports."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An own place for temporary files, to see what stays there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Have the command start another script."""

    def use(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        monkeypatch.setattr("kit.tools.verify_resume.run_script.SCRIPT", path)
        return path

    return use


@pytest.fixture
def flags(model_folder, chat_file):
    """The words of a short run, with others or other values."""

    def flags(**more):
        values = {"model_name_or_path": model_folder, "dataset": chat_file, "max_length": 256, "learning_rate": 1e-2}
        values |= {"global_batch_size": 8, "method": "lora", "lora_dropout": 0.1, "eval_split_size": 6, **more}
        return [f"--{name}={value}" for name, value in values.items()]

    return flags


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Its flags, and a cache and a current folder of its own."""
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = make_model(tmp_path / "model", max_position_embeddings=2048)
    write(tmp_path / "train.jsonl", *[chat(f"Question {i}", f"Answer {i}") for i in range(20)])
    return SimpleNamespace(flags=["--model_name_or_path", str(folder), "--dataset", "train.jsonl"])
