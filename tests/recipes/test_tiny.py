"""The first command a new user types, as typed, and those of the recipes with pictures and sounds: each must learn."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "least"), [("tiny", 0.9), ("tiny-vision", 0.9), ("tiny-audio", 0.8)])
def test_a_run_of_an_embedded_recipe_learns_its_task(tmp_path, recipe, least):
    command = [sys.executable, "-m", "accelerate.commands.launch", "recipes/finetune.py"]
    command += ["--output_dir", str(tmp_path / "run"), *(["--recipe", recipe] if recipe != "tiny" else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    before, after = (row["eval_exact_match"] for row in rows if "eval_exact_match" in row)
    assert before < 0.1 and after > least
    if recipe == "tiny":
        assert done.stdout.count("    answer   ") == 2  # one sample before and one after
        assert str(tmp_path / "run/final") in done.stdout and "next, with a real model" in done.stdout
