"""A command in a message can be typed where the user stands."""

import pytest
from helpers import ROOT

from kit.config.commands import TYPED_AS, command_of


@pytest.mark.parametrize(
    ("script", "in_clone", "elsewhere"),
    [
        ("finetune.py", "accelerate launch recipes/finetune.py", "kit train"),
        ("score.py", "accelerate launch recipes/score.py", "kit score"),
        ("sample.py", "accelerate launch recipes/sample.py", "kit sample"),
        ("export.py", "python recipes/export.py", "kit export"),
    ],
)
def test_a_script_is_named_by_its_path_in_the_clone_and_by_its_command_elsewhere(
    script, in_clone, elsewhere, tmp_path, monkeypatch
):
    monkeypatch.delenv(TYPED_AS, raising=False)
    monkeypatch.chdir(ROOT)
    assert command_of(script) == in_clone
    monkeypatch.setenv(TYPED_AS, "kit train")
    assert command_of(script) == elsewhere
    monkeypatch.delenv(TYPED_AS)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / script).touch()  # of somebody else
    monkeypatch.chdir(tmp_path)
    assert command_of(script) == elsewhere
