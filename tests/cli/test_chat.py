"""``kit chat`` opens what a path names, and passes on the flags of the recipe."""

import pytest

from kit.cli.chat import _own_flags, opened
from kit.errors import UserError


def test_a_run_is_its_final_model_or_its_newest_checkpoint(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert opened(str(run)) == str(run)  # no run, perhaps a model
    (run / "run.json").write_text("{}")
    with pytest.raises(UserError, match="has no final/ yet"):
        opened(str(run))
    for step in (2, 10):
        folder = run / f"checkpoints/step-{step:08}"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
    (run / "checkpoints/step-00000012").mkdir()  # not complete
    assert opened(str(run)).endswith("step-00000010")
    (run / "final").mkdir()
    assert opened(str(run)).endswith("/final")


def test_flags_of_the_recipe_are_passed_on():
    asked, words = _own_flags(["model", "--base", "--method", "qlora", "--temperature", "0.5", "--seed", "7"])
    assert (asked.with_base, asked.plain) == (True, False)
    assert words == [
        "--method=qlora",
        "--temperature=0.5",
        "--seed=7",
        "--model_name_or_path=model",
        "--max_new_tokens=512",
    ]
