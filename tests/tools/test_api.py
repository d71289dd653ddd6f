"""What `from kit import ...` promises: a recipe, a run, its result, and the messages of the command line."""

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

import kit
from kit.system.errors import UserError
from kit.tools import api


def test_what_is_promised_is_there_and_typed_and_importing_it_imports_nothing_else():
    code = "import kit, sys; print(*[name for name in sys.modules if name.startswith('kit.')], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert (ROOT / "kit/py.typed").is_file()
    assert set(kit.__all__) == {*api.__all__, "__version__"}
    for name in api.__all__:
        assert getattr(kit, name) is getattr(api, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        kit.no_such_name  # noqa: B018


def test_a_recipe_is_read_with_changes_and_mistakes_are_those_of_the_command_line():
    recipe = kit.read_recipe("tiny", max_steps=3, packing=True, dataset_columns={"a": "prompt", "b": "completion"})
    assert (recipe.max_steps, recipe.packing, recipe.method) == (3, True, "full")
    assert recipe.dataset_columns == {"a": "prompt", "b": "completion"}
    values = {"enable_thinking": False, "today": "false", "n": 3}
    assert kit.read_recipe("tiny", chat_template_kwargs=values).chat_template_kwargs == values
    with pytest.raises(UserError, match="a comma in an item"):
        kit.read_recipe("tiny", new_tokens=["<a,b>"])


class Started(io.StringIO):
    """Instead of ``subprocess.Popen``: a process that prints, leaves a run and ends."""

    def __init__(self, text="", status=0):
        super().__init__(text)
        self.stdout, self.status, self.signals = self, status, []

    def __call__(self, command, **options):
        self.command = command
        self.given = next((Path(word[9:]).read_text() for word in command if word.startswith("--recipe=/")), "")
        return self

    def wait(self):
        return self.status

    def communicate(self):
        return self.read(), None

    def send_signal(self, number):
        self.signals.append(number)


@pytest.fixture
def start(monkeypatch):
    def start(*values):
        started = Started(*values)
        monkeypatch.setattr(api.subprocess, "Popen", started)
        monkeypatch.setattr(api, "Run", lambda folder: folder)
        return started

    return start


def test_a_run_is_the_command_with_the_recipe_s_and_the_call_s_settings(start, capsys):
    started = start("step 1\n")
    recipe = kit.read_recipe("tiny", new_tokens="<a>,<b>")
    assert kit.finetune(recipe, config="ddp", num_processes=2, max_steps=3) == "runs/recipe-ddp"
    assert capsys.readouterr().out == "step 1\n"
    assert started.command[4:] == ["--max_steps=3", "--config=ddp", "--num_processes=2", "--output_dir=runs/recipe-ddp"]
    assert '"new_tokens": ["<a>", "<b>"]' in started.given
    assert "async_save" not in started.given  # a default, which a later version may change
    with pytest.raises(UserError, match="unknown flag"):
        kit.finetune("tiny", learning_rat=1)


def test_the_error_of_the_run_is_raised_with_its_text(start, capsys):
    for status, text, error in (
        (2, "error: dataset: no file 'x'\n    -> did you mean 'y'?\n", UserError),
        (1, "step 1\nerror: rank 0: loss nan\n", kit.RunFailed),
        (75, "step 1\n", kit.RunFailed),
    ):
        start(text, status)
        with pytest.raises(error) as caught:
            kit.finetune("tiny", quiet=True)
        said = "stopped by a signal, and saved" if status == 75 else text[text.index("error") :].strip()
        assert str(caught.value) == said and capsys.readouterr().out == ""


def test_an_interrupted_cell_lets_the_run_save(start, monkeypatch):
    started = start("step 1\n")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kit.finetune("tiny")
    assert started.signals == [signal.SIGINT]


@pytest.mark.slow
def test_the_example_of_the_documentation_works(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    run = names["again"]
    assert run.finished_steps == 4 and run.recipe.learning_rate == 1e-3
    assert len([row for row in run.metrics if "loss" in row]) == 4
    assert (run.final / "config.json").is_file() and run.report.is_file()
    assert repr(run) == "Run('runs/from-python', finished after 4 steps)"
    assert "fine-tuning recipe (full, Single), output_dir runs/from-python" in capsys.readouterr().out
