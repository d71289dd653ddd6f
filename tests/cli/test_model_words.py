"""RUN of a command names what lies in the folder of a run, or any model."""

import pytest

from kit.cli.model_words import opened, split_words
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


def test_a_model_is_named_once_and_a_switch_has_no_value():
    own, flags, problems = split_words(["--base", "--plain=x", "--seed", "3"], "kit chat", ("base", "plain"))
    assert own == {"base": "true", "plain": "x"} and flags == {"seed": "3"}
    assert [problem.fix for problem in problems] == ["", "kit chat RUN"]
    own, flags, problems = split_words(["adapter", "--model_name_or_path", "base"], "x", ())
    assert not own and not problems
    assert flags == {"model_name_or_path": "base", "adapter_name_or_path": "adapter"}
