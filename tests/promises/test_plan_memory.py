"""Formulas predict the bytes of the kit's step on fake tensors, and these the bytes of real runs."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("words", ["plan_formulas.py", "plan_memory.py --method lora full --topology fsdp2"])
def test_formulas_simulation_and_real_runs_agree_within_5_percent(words):
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1].rstrip("%.")) < 5, done.stdout
