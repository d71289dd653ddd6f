"""``benchmarks/gpu.py`` works before there is a GPU to run it on: on a CPU with tiny shapes, and on forged results."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, matrix

from benchmarks import gpu
from benchmarks.gpu import Skipped

IN_ONE_PROCESS = "rates four_bit varlen masks"
WITH_RUNS = ["streams generation ledger", "8b-lora-packed-plain", "syncs bf16", "collectives qlora_fsdp2"]
REST = [
    name for name in gpu.parts() if name.startswith(("8b-lora-padded", "1b-full-packed", "3b-qlora-padded", "trl-8b"))
]


@pytest.mark.slow
@pytest.mark.parametrize("parts", matrix([IN_ONE_PROCESS], rest=[*WITH_RUNS, *REST]))
def test_a_rehearsal_runs_through_and_its_page_says_that_no_gpu_was_measured(tmp_path, parts):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--out", str(tmp_path), "--rehearse", "--part"]
    done = subprocess.run([*command, *parts.split()], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads((tmp_path / f"{part}.json").read_text()) for part in parts.split()]
    # What only a GPU, or a package that is not installed, can show has a reason.
    assert all(record["result"] or (record["state"] == "skipped" and record["why"]) for record in records)
    (page,) = tmp_path.glob("*-gpu.md")
    assert "a rehearsal, not measured on a GPU" in page.read_text().splitlines()[0]


@pytest.fixture
def forged(monkeypatch, tmp_path):
    """Runs gpu.py with three parts: one that holds, one that fails, and one that is skipped."""
    calls = tmp_path / "calls"

    def part(name, bench):
        with calls.open("a") as file:
            file.write(f"{name} ")
        if name == "bad":
            raise ValueError("no kernel image")
        if name == "skips":
            raise Skipped("1 GPU, and the part needs 2")
        return {"row": "| lora |"}

    parts = {name: lambda bench, name=name: part(name, bench) for name in ("trl-good", "bad", "skips")}
    monkeypatch.setattr(gpu, "parts", lambda: parts)

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "out"), "--rehearse", *flags])
        status = gpu.main()
        (page,) = (tmp_path / "out").glob("*-gpu.md")
        return status, calls.read_text().split(), page.read_text()

    return run


def test_a_second_start_repeats_what_failed_and_nothing_else(forged):
    status, calls, page = forged()
    assert status == 1 and calls == ["trl-good", "bad", "skips"]
    assert "- bad: failed: ValueError: no kernel image" in page and "- skips: skipped: 1 GPU, and the part" in page
    assert forged()[1][3:] == ["bad"]
    assert forged("--part", "skips")[1][4:] == ["skips"]
