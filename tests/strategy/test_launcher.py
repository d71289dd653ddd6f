"""What a launcher does to its ranks: ends them, starts them again, dies before them."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import ROOT, matrix

from kit.config.recipe import Recipe
from kit.strategy.launcher import (
    LaunchedRank,
    end_launcher_later,
    end_with_launcher,
    launched_rank,
    launcher_id,
    launcher_is_gone,
    num_processes_of_accelerate,
    recipe_after_restart,
)


def test_restarted_ranks_delete_nothing_and_continue(tmp_path, monkeypatch):
    recipe = Recipe(model_name_or_path="m", dataset="d", output_dir=str(tmp_path), overwrite_output_dir=True)
    lock = tmp_path / ".lock"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    own, other = launcher_id(), "0" * 16

    def signed_by(*launchers, emptied=True):
        lock.write_text(json.dumps({"emptied": emptied, "launchers": launchers}))

    signed_by(own, other)
    assert recipe_after_restart(recipe).overwrite_output_dir is False
    signed_by(own, other, emptied=False)
    assert recipe_after_restart(recipe) == recipe  # a rank died before the folder was emptied
    signed_by(other)
    assert recipe_after_restart(recipe) == recipe  # by another launch, whatever the clocks say
    lock.unlink()
    assert recipe_after_restart(recipe) == recipe
    signed_by(own)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert recipe_after_restart(recipe) == recipe  # no launcher that could start it anew
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (
        recipe_after_restart(recipe.model_copy(update={"resume_from_checkpoint": "none"})).resume_from_checkpoint
        == "auto"
    )
    elsewhere = recipe.model_copy(update={"resume_from_checkpoint": "/other/step-00000007"})
    assert recipe_after_restart(elsewhere).resume_from_checkpoint == "/other/step-00000007"


RANK = """
import sys
sys.path.insert(0, sys.argv[1])
from kit.strategy.launcher import record_exit, exit_if_recorded
exit_if_recorded()
print("started", flush=True)
record_exit(int(sys.argv[2]), is_final=True)
"""


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Starts a rank that ends with a status, as torchrun starts it for the first time or again."""
    monkeypatch.setenv("KIT_CACHE", str(tmp_path))

    def rank(restarts, status=2, allowed=3):
        counts = {"TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCHELASTIC_MAX_RESTARTS": str(allowed)}
        words = [sys.executable, "-c", RANK, str(ROOT), str(status)]
        done = subprocess.run(words, env=os.environ | counts, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.strip()

    return rank


@pytest.mark.slow
def test_restarted_ranks_end_at_once_with_the_recorded_status(rank):
    assert rank(restarts=1) == (0, "started")  # nothing is known of an end
    assert rank(restarts=0, status=75) == (0, "started")
    assert rank(restarts=1) == (75, "")
    assert rank(restarts=0, status=2) == (0, "started")  # the first start of this launcher is never held back


@pytest.mark.slow
def test_no_exit_is_recorded_where_nothing_restarts(rank, tmp_path):
    rank(restarts=0, allowed=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_old_exit_records_are_deleted(rank, tmp_path):
    (tmp_path / "ended").mkdir()
    for name, age in (("old", 90_000), ("new", 60)):
        (tmp_path / "ended" / name).touch()
        os.utime(tmp_path / "ended" / name, times=(time.time() - age,) * 2)
    rank(restarts=0)
    assert {path.name for path in (tmp_path / "ended").iterdir()} > {"new"}
    assert not (tmp_path / "ended/old").exists()


def test_a_command_without_a_launcher_is_not_ended(monkeypatch):
    monkeypatch.delenv("KIT_ACCELERATE_PID", raising=False)
    assert not launcher_is_gone()
    monkeypatch.setenv("KIT_ACCELERATE_PID", str(os.getppid()))
    monkeypatch.delenv("RANK", raising=False)
    assert not launcher_is_gone()
    monkeypatch.setenv("KIT_ACCELERATE_PID", str(os.getpid()))  # the parent is another one now
    assert launcher_is_gone()


def test_what_a_script_under_a_launcher_starts_has_another_launcher_or_none(monkeypatch):
    monkeypatch.setenv("KIT_ACCELERATE_PID", "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: ["python", "mine.py"])
    end_with_launcher()
    assert "KIT_ACCELERATE_PID" not in os.environ and not launcher_is_gone()


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("python accelerate launch --num_processes 4 run.py --num_processes 2", 4),
        ("python -m accelerate.commands.launch --num-processes=3 run.py", 3),
        ("python accelerate launch run.py --num_processes 2", None),
        ("bash accelerate.sh --num_processes 4", None),
        ("torchrun --num_processes 4 run.py", None),
    ],
)
def test_what_accelerate_was_asked_for_stands_before_the_script(monkeypatch, words, asked):
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: words.split())
    monkeypatch.setattr("sys.argv", ["run.py"])
    assert num_processes_of_accelerate() == asked


def test_a_rank_knows_its_number_and_whether_other_machines_take_part(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched_rank() is None
    for name, value in {"RANK": 9, "WORLD_SIZE": 16, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    assert launched_rank() == LaunchedRank(9, 16, 1, 8) and launched_rank().several_machines
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert not launched_rank().several_machines


FAILED_RANK = """
import os, sys
sys.path.insert(0, sys.argv[1])
from kit.strategy import launcher
launcher.GRACE_SECONDS = 0.2
launcher.end_launcher_later()
"""
STUCK_LAUNCHER = """
import subprocess, sys, time
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], check=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local_world", "restarts", "ends"), matrix([(1, "0", True), (1, "3", False), (2, "0", False)], always=2)
)
def test_a_launcher_that_lingers_on_one_of_several_machines_is_killed(local_world, restarts, ends):
    env = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(local_world), "LOCAL_RANK": "0"}
    seconds = "60" if ends else "3"
    launcher = subprocess.Popen(
        [sys.executable, "-c", STUCK_LAUNCHER, FAILED_RANK, str(ROOT), seconds],
        env=env | {"TORCHELASTIC_MAX_RESTARTS": restarts},
    )
    try:
        assert launcher.wait(40) == (-9 if ends else 0)
    finally:
        launcher.kill()


def test_what_ends_the_launcher_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "psutil.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "0"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    launcher = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
    monkeypatch.setattr("kit.strategy.launcher.GRACE_SECONDS", 0.1)
    end_launcher_later()
    assert launcher.wait(30) == -signal.SIGKILL
    assert not (tmp_path / "imported").exists()
