"""Ctrl-C at any time, under every launcher: the run saves after a whole step and writes its report."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from helpers import ROOT, matrix

from kit.checkpoint.manifest import list_checkpoints, verify
from kit.system import lock
from kit.system.errors import UserError

pytestmark = pytest.mark.slow

SCRIPT = str(ROOT / "recipes/finetune.py")
ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch", SCRIPT]
FORMS = {
    "accelerate, single": (ACCELERATE, "single"),
    "accelerate, ddp": (ACCELERATE, "ddp"),
    "python, single": ([SCRIPT], "single"),
    "python, ddp": ([SCRIPT], "ddp"),
    "kit train, ddp": (["-m", "kit.cli.main", "train"], "ddp"),
}


@pytest.mark.parametrize("form", matrix(["accelerate, single", "python, ddp"], rest=FORMS))
def test_ctrl_c_loses_no_step_and_leaves_a_report(finetune, request, form):
    """One run, interrupted again and again; each start continues after the last step of the start before."""
    launcher, config = FORMS[form]
    flags = {**finetune.defaults, "output_dir": finetune.folder / "run", "config": config, "max_steps": 100_000}
    flags |= {"method": "lora", "lora_dropout": 0.1}
    command = [sys.executable, *launcher, *(f"--{name}={value}" for name, value in flags.items())]
    rng, log = random.Random(form), finetune.folder / "log"
    steps = 0
    for number in range(request.config.getoption("--interrupts")):
        steps = interrupted(command, flags["output_dir"], log, steps, rng.uniform(0, 1.5))
        print(f"{form}: Ctrl-C {number + 1} after step {steps}", flush=True)


def interrupted(command, folder, log, before, pause):
    """Start the command, press Ctrl-C ``pause`` seconds after its first step, and look at what is left.

    Returns:
        the number of steps that are done by then.
    """
    report = folder / "report.html"
    report.unlink(missing_ok=True)
    launcher = begin(command, log)
    try:
        wait_until(lambda: last_step(folder) > before or launcher.poll() is not None, log)
        time.sleep(pause)
        assert launcher.poll() is None, log.read_text()
        os.killpg(launcher.pid, signal.SIGINT)
        status = launcher.wait(300)
        wait_until(lambda: not is_in_use(folder), log)  # `accelerate launch` may have returned before the run
    finally:
        launcher.kill()
    text, steps = log.read_text(), last_step(folder)
    assert steps > before, text
    assert json.loads((folder / "run.json").read_text())["interrupted"] == steps, text
    newest = list_checkpoints(folder / "checkpoints")[-1]
    assert newest.name == f"step-{steps:08d}" and not verify(newest), text
    assert f"stopped by a signal after step {steps} of" in text, text
    assert report.is_file(), text
    assert not before or f"continuing after step {before} of" in text, text
    assert "accelerate" in " ".join(command) or status in (75, 1), text
    return steps


def begin(command, log, **options):
    """Start it in a session of its own, as a terminal has: Ctrl-C reaches all that no launcher moved elsewhere."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with log.open("w") as file:
        options |= {"stdout": file, "stderr": file, "start_new_session": True, "env": env | {"PYTHONPATH": str(ROOT)}}
        return subprocess.Popen(command, **options, preexec_fn=hear_ctrl_c)


def hear_ctrl_c():
    """Whoever runs the tests in the background of a script has it ignored in every process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def last_step(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def is_in_use(folder):
    try:
        lock.check_free(folder)
    except UserError:
        return True
    return False


def wait_until(happened, log, seconds=240):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"not within {seconds} s\n{log.read_text()}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "seconds"),
    matrix(
        [("recipes/finetune.py --config single", 0.2), ("recipes/finetune.py --config ddp", 2.0)],
        rest=[("-m kit.cli.main train --config single", 3.0), ("-m kit.cli.main doctor --config ddp", 1.0)],
    ),
)
def test_ctrl_c_in_the_first_seconds_starts_nothing_and_shows_no_traceback(tmp_path, words, seconds):
    """Seconds of CPU, in the imports of the kit, of torch, of transformers, in the checks: not of a busy clock."""
    log, folder = tmp_path / "log", tmp_path / "run"
    command = [sys.executable, *words.split(), *([] if "doctor" in words else ["--output_dir", str(folder)])]
    process = begin(command, log, cwd=ROOT)
    try:
        wait_until(lambda: cpu_seconds(process.pid) >= seconds or process.poll() is not None, log)
        assert process.poll() is None, f"it ended in less than {seconds} s of CPU"
        os.killpg(process.pid, signal.SIGINT)
        status = process.wait(120)
    finally:
        process.kill()
    text = log.read_text()
    assert "Traceback" not in text, text
    assert status in (130, -signal.SIGINT)  # a shell shows both as 130
    assert not (folder / "run.json").exists()


def cpu_seconds(pid):
    """The CPU time of a process and of all that it started."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(time.user + time.system for time in times)
    return 0.0
