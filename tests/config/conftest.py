"""A recipe of the user's own, in the folder where the command is typed."""

import pytest

BASE = {"model_name_or_path": "some/model", "dataset": "some/data"}


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, *, base=True):
        lines = "".join(f"{key}: {value}\n" for key, value in BASE.items()) if base else ""
        (tmp_path / "mine.yaml").write_text(lines + text, encoding="utf-8")
        return ["--recipe", "mine.yaml"]

    return write
