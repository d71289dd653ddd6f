"""Formulas predict the bytes of the kit's step on fake tensors, and these the bytes of real runs."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("benchmark", ["plan_formulas", "plan_memory"])
def test_formulas_simulation_and_real_runs_agree_within_5_percent(benchmark):
    command = [sys.executable, str(ROOT / f"benchmarks/{benchmark}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1].rstrip("%.")) < 5, done.stdout
