"""The recipe with sounds, as typed: it must learn to hear them."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.long
@pytest.mark.slow
def test_the_run_on_sounds_learns_its_task(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "recipes/finetune.py", "--recipe", "tiny-audio"]
    command += ["--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    before, after = (row["eval_exact_match"] for row in rows if "eval_exact_match" in row)
    assert before == 0 and after > 0.8
