"""A signal stops a run after a whole step and a save; the same command then completes it bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from helpers import ROOT, matrix, signal_in_step

from kit.system.console import QUIET_SECONDS

pytestmark = pytest.mark.slow

FLAGS = {
    "method": "lora",
    "lora_dropout": 0.1,
    "max_steps": 8,
    "save_steps": 7,
    "max_eval_samples": 5,
    "eval_steps": 2,
}


@pytest.mark.parametrize(
    ("config", "processes", "number", "rank"),
    matrix(
        [
            ("single", 1, signal.SIGTERM, 0),
            ("fsdp", 2, signal.SIGTERM, 0),
            ("ddp", 2, signal.SIGUSR1, 1),
        ],
    ),
)
def test_a_signal_to_one_rank_stops_all_after_a_whole_step_and_nothing_is_lost(
    finetune, chat_file, config, processes, number, rank
):
    flags = FLAGS | {"config": config, "eval_dataset": chat_file, "global_batch_size": 12}
    whole = finetune.ok("whole", processes, **flags)
    folder = finetune.folder / "half"

    stopped = finetune("half", processes, prepare=partial(signal_in_step, 3, number, rank), **flags)
    assert stopped.status == 75, stopped.output
    steps = [row["step"] for row in stopped.rows if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)) and 3 <= len(steps) < 8
    assert stopped.info["interrupted"] == len(steps) and stopped.info["finished_steps"] == 0
    assert f"stopped by a signal after step {len(steps)} of 8, and saved" in stopped.output
    assert not (folder / "final").exists() and "Traceback" not in stopped.output
    assert (f"{number.name}: stopping and saving" in stopped.output) == (rank == 0)
    assert "<title>half" in (folder / "report.html").read_text()
    continued = finetune.ok("half", processes, **flags)
    assert f"continuing after step {len(steps)} of 8" in continued.output
    assert continued.info["interrupted"] is None and continued.info["finished_steps"] == 8
    assert continued.losses == whole.losses
    assert evaluations(continued) == evaluations(whole) and len(evaluations(whole)) == 4


@pytest.mark.parametrize(("config", "processes"), matrix([("ddp", 2), ("single", 1)]))
def test_a_signal_within_an_evaluation_does_not_wait_for_its_end(finetune, chat_file, config, processes):
    """To one rank only; the evaluation is done after the same step when the run goes on."""
    flags = FLAGS | {"config": config, "eval_dataset": chat_file, "max_steps": 4}
    flags |= {"max_eval_samples": 24, "per_device_eval_batch_size": 2}
    whole = finetune.ok("whole", processes, **flags)

    def meanwhile(children):
        if "evaluating" in (finetune.folder / "half.log").read_text():
            os.kill(children[-1].pid, signal.SIGTERM)
            return True

    stopped = finetune("half", processes, meanwhile, evaluate_slowly, **flags)
    assert stopped.status == 75, stopped.output
    assert stopped.info["interrupted"] == 2 and not evaluations(stopped)
    continued = finetune.ok("half", processes, **flags)
    assert continued.losses == whole.losses
    assert evaluations(continued) == evaluations(whole) and len(evaluations(whole)) == 2


def evaluate_slowly(rank):
    import kit.evaluate

    batches = kit.evaluate.evaluation_batches

    def slowly(*args):
        print("evaluating", flush=True)
        for batch in batches(*args):
            time.sleep(0.5)
            yield batch

    kit.evaluate.evaluation_batches = slowly


@pytest.mark.long
def test_a_run_continues_when_the_reader_of_its_output_ends(finetune):
    """Ctrl-C ends `tee` too, which reads what the run says; a run must save whoever listens."""
    folder = finetune.folder / "run"
    flags = {**finetune.defaults, "output_dir": folder, "max_steps": 5000, "config": "single", "save_steps": 0}
    command = [
        sys.executable,
        str(ROOT / "recipes/finetune.py"),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert any(line.startswith("step 1/") for line in process.stdout)
        process.stdout.close()
        time.sleep(QUIET_SECONDS + 5)  # it has something to say, to nobody
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 75
    finally:
        process.kill()
    stopped = json.loads((folder / "run.json").read_text())["interrupted"]
    assert (folder / f"checkpoints/step-{stopped:08d}/manifest.json").is_file()


def evaluations(run):
    return [(row["step"], float(row["eval_loss"]).hex()) for row in run.rows if "eval_loss" in row]


WAITING = """
import sys, time
sys.path.insert(0, {root!r})
from types import SimpleNamespace
from kit.failures.signals import StopRequest
request = StopRequest(SimpleNamespace(num_processes=1, is_main_process=True))
print("ready", flush=True)
end = time.monotonic() + 3
while time.monotonic() < end:
    time.sleep(0.05)
print(request.is_made)
"""


@pytest.mark.parametrize(
    ("first", "second", "pause", "status"),
    matrix(
        [
            (signal.SIGINT, signal.SIGTERM, 1.2, 130),  # as a second Ctrl-C comes through torchrun
            (signal.SIGTERM, signal.SIGTERM, 1.2, 0),
            (signal.SIGINT, signal.SIGINT, 0.0, 0),  # the same Ctrl-C, through the launcher
        ],
        always=2,
    ),
)
def test_a_second_signal_ends_the_run_at_once_only_after_ctrl_c(first, second, pause, status):
    code = WAITING.format(root=str(ROOT))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(first)
    time.sleep(pause)
    process.send_signal(second)
    assert process.wait(20) == status
    assert process.stdout.read() == ("True\n" if status == 0 else "")


ACCELERATE = ["-m", "accelerate.commands.launch"]


@pytest.mark.parametrize(
    ("launcher", "config", "number"),
    matrix(
        [
            (ACCELERATE, "ddp", signal.SIGTERM),
            ([], "fsdp", signal.SIGTERM),
        ],
        always=0,
        rest=[(ACCELERATE, "single", signal.SIGTERM), ([], "ddp", signal.SIGUSR1)],
    ),
)
def test_a_signal_to_the_launcher_saves_and_ends_the_run(finetune, launcher, config, number):
    """`accelerate launch` dies of SIGTERM without a word to what it started; Slurm and Kubernetes send it there."""
    folder = finetune.folder / "run"
    flags = {**finetune.defaults, "output_dir": folder, "max_steps": 5000, "config": config}
    command = [sys.executable, *launcher, str(ROOT / "recipes/finetune.py")]
    command += [f"--{name}={value}" for name, value in flags.items()]
    with (finetune.folder / "log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log)

    def text(path):
        return path.read_text() if path.exists() else ""

    try:
        wait_until(lambda: text(folder / "metrics.jsonl").count('"loss"') >= 3)
        launcher.send_signal(number)
        wait_until(lambda: "stopped by a signal" in text(finetune.folder / "log"))
    finally:
        launcher.kill()
    assert '"interrupted": null' not in text(folder / "run.json")
    assert list((folder / "checkpoints").glob("step-*/manifest.json"))


def wait_until(happened, seconds=90):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)
