"""``kit verify-resume`` reports exact and inexact resumes correctly, and leaves no files."""

import subprocess
import sys

import pytest
from helpers import ROOT, matrix

from kit.cli.main import main

# A run in the eyes of the command, without torch. Capitals are for each test to replace.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
folder, steps = Path(flags["output_dir"]), int(flags["max_steps"])
(folder / "final").mkdir(parents=True, exist_ok=True)
(folder / "final/model.safetensors").write_bytes(b"weights")
strategy = {"type": "single", "num_processes": 1, "mixed_precision": "no", "device": "H100", "cpu_dry_run": False}
strategy |= {"sharded_layers": None, "trainable_parameters": 1, "config": "single"}
strategy |= {"offload": False, "num_replicas": 1, "num_threads": 1}
recipe = {"model_name_or_path": "m", "dataset": "d", "gradient_checkpointing": "selective"}
first = max([0, *(int(path.name[5:]) for path in folder.glob("checkpoints/step-*"))]) if CONTINUES else 0
(folder / "run.json").write_text(json.dumps({"strategy": strategy, "recipe": recipe, "starts": [{"step": first}]}))
kept = (folder / "metrics.jsonl").read_text().splitlines(True)[:first] if first else []
with open(folder / "metrics.jsonl", "w", 1) as metrics:
    metrics.writelines(kept)
    for step in range(first + 1, steps + 1):
        row = {"step": step, "loss": LOSS, "grad_norm": 1, "learning_rate": 1, "seconds": time.perf_counter()}
        metrics.write(json.dumps(row) + chr(10))
        if step % int(flags["save_steps"]) == 0 or step == steps:
            checkpoint = folder / f"checkpoints/step-{step:08d}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "manifest.json").touch()
        time.sleep(PAUSE)
"""


def fake(loss="1 / step", continues=True, pause=0.2):
    return SCRIPT.replace("LOSS", loss).replace("CONTINUES", str(continues)).replace("PAUSE", str(pause))


@pytest.mark.slow
@pytest.mark.parametrize("config", matrix(["ddp"], always=0, rest=["single"]))
def test_a_run_that_continues_exactly_is_reported_as_exact_and_leaves_nothing(config, flags, temporary, tmp_path):
    command = [sys.executable, "-m", "kit.cli.main", "verify-resume", "--steps", "5", "--kill-after", "2"]
    # What a run's own command may hold does no harm: its folder, its length, its trackers.
    mine = flags(config=config, output_dir=tmp_path / "mine", max_steps=3, eval_steps=50)
    done = subprocess.run([*command, *mine], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nexact: 3 steps after the kill and the final weights are equal bit for bit\n")
    assert "2 of 3: the same, killed when" in done.stdout
    table = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit() and "loss" in line]
    assert [(row[0], row[2] == row[4], row[-1]) for row in table] == [(f"{n}", True, "none") for n in range(1, 6)]
    assert list(temporary.iterdir()) == [] and not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_a_script_that_starts_again_has_not_resumed_though_all_is_equal(temporary, script, capsys):
    script(fake(continues=False))
    assert main(["verify-resume"]) == 1
    out = capsys.readouterr().out
    assert out.count("none\n") == 6 and out.endswith("not continued: the run started again at step 1\n")


def test_wrong_flags_are_reported_at_once_and_nothing_is_written(temporary, capsys):
    assert main(["verify-resume", "--steps", "6", "--kill_after", "6", "--seed", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: 2 problems\n") and list(temporary.iterdir()) == []
    for message in ("--kill_after: step 6 of 6; expected a step before the last", "--seed: found 'x'"):
        assert message in err
