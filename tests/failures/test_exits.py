"""Every end of a script has its exit status and one error message, after a clean-up."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

from kit.failures import exits
from kit.system.errors import Problem, UserError

LEAVING = """
import errno, sys
sys.path.insert(0, {root!r})
from kit.failures import exits
from kit.system.errors import TrainingError, UserError, Problem
exits.explain_with(lambda error: TrainingError("old") if isinstance(error, KeyError) else None)
exits.explain_with(lambda error: UserError(Problem("x", "new")) if isinstance(error, KeyError) else None)
exits.finish_first(lambda: print("finished", flush=True))
with exits.reporting_errors():
    raise {error}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "status", "found"),
    [
        (
            "OSError(errno.ENOSPC, 'No space left on device', '/d/metrics.jsonl')",
            2,
            "error: /d/metrics.jsonl: No space",
        ),
        ("KeyError('k')", 2, "error: x: new"),
        ("TrainingError('loss nan')", 1, "error: rank 0: loss nan"),
        ("ZeroDivisionError('odd')", 1, "rank 0 failed:\nTraceback"),
        ("BaseException('a panic in Rust')", 1, "rank 0 failed:\nTraceback"),
    ],
)
def test_every_failure_has_its_status_and_lets_a_save_end_first(error, status, found):
    code = LEAVING.format(root=str(ROOT), error=error)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == status and found in done.stderr and done.stdout == "finished\n"
    assert ("Traceback" in done.stderr) == (status == 1 and "loss nan" not in error)


@pytest.mark.slow
@pytest.mark.parametrize(("last", "status"), [("pass", 0), ("exits.leave(75)", 75), ("raise KeyboardInterrupt", 130)])
def test_registered_functions_are_called_without_an_error_too(last, status):
    code = LEAVING.format(root=str(ROOT), error="x").replace("raise x", last)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    line = "\nstopped by Ctrl-C; type the same command to start again\n" if status == 130 else ""
    assert (done.returncode, done.stdout, done.stderr) == (status, "finished\n", line)


@pytest.fixture
def failing(monkeypatch, capfd):
    """Ends a script with an error after it knew its folder; returns what it printed."""

    def leave(status):
        raise SystemExit(status)

    def failing(folder=None, found="missing"):
        with pytest.raises(SystemExit), exits.reporting_errors():
            if folder:
                exits.repeat_errors_in(folder)
            raise UserError(Problem("dataset", found))
        return capfd.readouterr().err

    monkeypatch.setattr(os, "_exit", leave)
    return failing


def test_an_error_is_repeated_in_the_folder_of_the_run_and_the_last_line_says_so(failing, tmp_path):
    text = failing(tmp_path, f"hf_{'a1' * 17} is missing")
    assert text.splitlines()[-1] == f"(this message is also in {tmp_path / 'error.txt'})"
    kept = (tmp_path / "error.txt").read_text()
    assert "error: dataset: " in kept and "is missing" in kept and "hf_" not in kept
    failing(tmp_path, "of the next start")
    text = (tmp_path / "error.txt").read_text()
    assert "missing" not in text and "of the next start" in text


@pytest.mark.parametrize("by", ["symlink_to", "hardlink_to"])
def test_an_error_is_written_to_no_file_elsewhere(failing, tmp_path, by):
    victim, run = tmp_path / "victim", tmp_path / "run"
    run.mkdir()
    victim.write_text("precious")
    getattr(run / "error.txt", by)(victim)
    assert "dataset: missing" in failing(run)
    assert victim.read_text() == "precious" and "dataset: missing" in (run / "error.txt").read_text()


def test_no_folder_is_made_for_an_error(failing, tmp_path):
    assert failing(tmp_path / "run") == "\nerror: dataset: missing\n"
    assert not list(tmp_path.iterdir())
    assert failing(None) == "\nerror: dataset: missing\n"  # not the folder of an earlier command
