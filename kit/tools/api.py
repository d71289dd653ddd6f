"""Fine-tune from Python: read a recipe, run it as the command line does, and look at the result.

Promises: ``finetune`` starts ``recipes/finetune.py`` in processes of its own, so that a notebook holds no GPU memory
afterwards, ranks can be started, and the run is the same as from the command line. A mistake raises ``UserError``
before any process is started where that is possible, with the message of the command line.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.config.command_line import read_command_line
from kit.config.paths import RECIPES
from kit.config.recipe import Recipe
from kit.failures.exits import STOPPED
from kit.run.record import RUN_FILE, read_metrics, read_run
from kit.system.console import show
from kit.system.durable import read_small
from kit.system.errors import UserError, raise_if
from kit.tools.typed import typed

__all__ = ["Recipe", "Run", "RunFailed", "UserError", "finetune", "open_run", "read_recipe"]


class RunFailed(Exception):
    """A run ended with a failure. The message is what it printed last; ``status`` is its exit status."""

    def __init__(self, status: int, text: str) -> None:
        """``text``: the last lines of the run."""
        self.status = status
        super().__init__(text)


class Run:
    """A run in its ``output_dir``. Each attribute reads its file again, so it follows a run that is still training."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """
        Args:
            folder: the ``output_dir``.

        Raises:
            UserError: the folder holds no run.
        """
        self.folder = Path(folder)
        read_run(self.folder / RUN_FILE)  # raises if there is no run

    def __repr__(self) -> str:
        steps = f"finished after {self.finished_steps} steps" if self.finished_steps else "not finished"
        return f"Run({str(self.folder)!r}, {steps})"

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run, with all defaults filled in."""
        return read_run(self.folder / RUN_FILE)[0]

    @property
    def finished_steps(self) -> int:
        """The number of steps after which the run finished; 0 if it did not."""
        return int(json.loads(read_small(self.folder / RUN_FILE))["finished_steps"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``; those of training have ``loss``, those of evaluation ``eval_loss``."""
        return read_metrics(self.folder)

    @property
    def final(self) -> Path:
        """The folder for ``from_pretrained``. It is there once the run has finished."""
        return self.folder / "final"

    @property
    def report(self) -> Path:
        """The page that shows the run."""
        return self.folder / "report.html"


def read_recipe(recipe: str = "tiny", **changes: Any) -> Recipe:
    """Read and validate a recipe.

    Args:
        recipe: a path, or a name that ``kit recipes`` lists.
        changes: settings that override those of the file, such as ``max_steps=100``.

    Raises:
        UserError: with all problems.
    """
    request = read_command_line(_words({"recipe": recipe, **changes}))
    raise_if(request.problems)
    assert request.recipe is not None
    return request.recipe


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Return the run in an ``output_dir``. Raises ``UserError`` if there is none."""
    return Run(folder)


def finetune(
    recipe: str | Recipe = "tiny",
    *,
    config: str | None = None,
    num_processes: int | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **changes: Any,
) -> Run:
    """Run a recipe, and return the run when it has finished. The same call again continues a run that was stopped.

    Args:
        recipe: a path, a name that ``kit recipes`` lists, or what ``read_recipe`` returned.
        config: an Accelerate config: a path, or a name in ``accelerate_configs/``. None: one process in fp32.
        num_processes: as the flag.
        output_dir: the folder of the run; None: ``runs/<recipe>-<config>``.
        quiet: do not print what the run prints.
        changes: settings that override the recipe's.

    Raises:
        UserError: the user can fix it.
        RunFailed: any other end of the run but a finished one. After a ``KeyboardInterrupt`` the run has saved.
    """
    with tempfile.TemporaryDirectory() as temporary:
        if isinstance(recipe, Recipe):
            file = Path(temporary) / "recipe.yaml"
            values = recipe.model_dump(exclude_unset=True, mode="json")
            given = values.get("chat_template_kwargs")
            if given:  # the values in a file are read as JSON, so the string "false" needs its quotes
                values["chat_template_kwargs"] = {key: json.dumps(value) for key, value in given.items()}
            file.write_text(json.dumps(values), encoding="utf-8")
            recipe = str(file)
        words = _words({"recipe": recipe, **changes})
        request = read_command_line(words)
        raise_if(request.problems)
        assert request.recipe is not None
        default = f"runs/{request.recipe_name}-{Path(config).stem if config else 'single'}"
        folder = os.fspath(output_dir or request.recipe.output_dir or default)
        launch = {"config": config, "num_processes": num_processes, "output_dir": folder}
        words += _words({name: value for name, value in launch.items() if value is not None and name not in changes})
        _start(words, quiet)
    return Run(folder)


def _start(words: list[str], quiet: bool) -> None:
    """Run the script with these words, print what it prints, and wait for its end. Raises as ``finetune`` does."""
    command = [sys.executable, "-u", str(RECIPES / "finetune.py"), *words]
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines = [*lines[-200:], line.rstrip()]
                if not quiet:
                    show(line.rstrip("\n"))
            status = process.wait()
        except BaseException:  # Ctrl-C in the notebook: the run saves before it ends
            process.send_signal(signal.SIGINT)
            process.communicate()  # keeps reading: a full pipe would block the run
            raise
    text = "\n".join(lines)
    if status == 0:
        return
    error = re.search(r"^error: .*", text, re.MULTILINE | re.DOTALL)
    message = error[0] if error else text
    if status == UserError.exit_status:
        raise _PrintedError("finetune", message)
    if status == STOPPED:
        message = "stopped by a signal, and saved"
    raise RunFailed(status, message)


class _PrintedError(UserError):
    """A mistake of the user that the script found: the message as it was printed."""

    def __str__(self) -> str:
        return self.problems[0].found


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line."""
    return [f"--{name}={typed(name, value)}" for name, value in settings.items()]
