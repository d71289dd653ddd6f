"""``kit score --tasks`` takes its own flags, and passes on those of the recipe."""

import pytest

from kit.cli import score_tasks
from kit.cli.main import main
from kit.cli.score_tasks import _own_flags, is_asked
from kit.errors import UserError


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(score_tasks, "find_spec", lambda name: object())


def test_only_tasks_make_it_this_command():
    assert is_asked(["run", "--tasks", "arc_easy"]) and is_asked(["--tasks=arc_easy"])
    assert not is_asked(["--model_name_or_path", "run", "--eval_dataset", "tasks"])


def test_flags_of_the_recipe_are_passed_on(installed):
    words = "model --tasks a,b --base --limit 0.5 --num_fewshot 3 --per_device_eval_batch_size 2 --method qlora"
    asked, rest = _own_flags(words.split())
    assert (asked.tasks, asked.with_base, asked.plain, asked.runs_unsafe_code) == (["a", "b"], True, False, False)
    assert (asked.limit, asked.num_fewshot, asked.batch_size, asked.max_new_tokens) == (0.5, 3, 2, None)
    assert rest == ["--method=qlora", "--model_name_or_path=model"]
    assert _own_flags(["model", "--tasks", "a", "--max_new_tokens", "9"])[0].max_new_tokens == 9


def test_all_mistakes_are_reported_at_once(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text("task: a")
    words = "model --tasks , --limit 1.5 --num_fewshot -1 --include_path task.yaml --eval_dataset x.jsonl --base=x"
    with pytest.raises(UserError) as caught:
        _own_flags(words.split())
    text = str(caught.value)
    for found in ("--tasks: no name", "--limit: found '1.5'", "--num_fewshot: found '-1'", "--base: found 'x'"):
        assert found in text
    assert "--eval_dataset: with --tasks" in text and "--include_path .; or --tasks task.yaml" in text


def test_without_lm_eval_it_says_what_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(score_tasks, "find_spec", lambda name: None)
    assert main(["score", "model", "--tasks", "a"]) == 2
    assert 'pip install "accelerate-recipes[eval]"' in capsys.readouterr().err


def test_help_is_of_this_command(capsys):
    assert main(["score", "--tasks", "--help"]) == 0
    assert "--include_path" in capsys.readouterr().out
