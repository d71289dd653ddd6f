"""Real runs hold and gather the bytes that a simulation of them predicts: ``benchmarks/plan_memory.py``."""

import itertools
import subprocess
import sys

import pytest
from helpers import ROOT, matrix

CASES = list(itertools.product(("lora", "full", "qlora"), ("fsdp2", "single")))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "topology"), matrix([("lora", "fsdp2"), ("full", "single")], always=0, rest=CASES))
def test_a_simulation_predicts_real_bytes_within_5_percent(method, topology):
    command = [sys.executable, str(ROOT / "benchmarks/plan_memory.py"), "--method", method, "--topology", topology]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {method} | {topology} |")]
    error = float(done.stdout.split()[-1].rstrip("%."))
    assert len(rows) == 3 and error < 5, done.stdout  # without checkpointing, with the selective one, and with all
