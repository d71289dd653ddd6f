"""``benchmarks/gpu.py`` works before there is a GPU to run it on: on a CPU with tiny shapes, and on forged results."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, matrix

from benchmarks import gpu
from benchmarks.gpu import Bench, Figure, Skipped

IN_ONE_PROCESS = "rates four_bit varlen masks streams generation ledger"
WITH_RUNS = ["8b-lora-packed-plain", "syncs bf16", "collectives qlora_fsdp2"]
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


def run_of(**changes):
    found = {"losses": [2.0, 1.5], "tokens_per_second": 11000.0, "useful_tokens_per_second": 10000.0}
    found |= {"tflops_per_second": 350.0, "peak_bytes": 30 * 2**30, "planned_bytes": 30 * 2**30}
    return found | {"planned_tokens_per_second": [9000.0, 13000.0]} | changes


def test_the_page_judges_each_figure_each_run_and_each_line_of_the_ledger(tmp_path):
    results = {
        "varlen": [vars(Figure("kernel: output", 0.001, at_most=0.01)), vars(Figure("nan", float("nan"), at_most=1))],
        "8b-lora-packed-plain": run_of(),
        "8b-lora-packed-selective": run_of(losses=[2.0, 1.6], tokens_per_second=8000.0, peak_bytes=33 * 2**30),
        "ledger": {"eager": dict.fromkeys(gpu.LEDGER, 30.0), "compiled": dict.fromkeys(gpu.LEDGER, 4.0)},
    }
    records = {name: {"part": name, "state": "done", "why": "", "result": each} for name, each in results.items()}
    page = "\n".join(gpu.report(records, Bench(tmp_path, rehearse=False)))
    assert (
        "| varlen | kernel: output | 0.001 | at most 0.01 | holds |" in page and "nan | at most 1 | **does not" in page
    )
    assert "| 11,000 | 9,000 to 13,000 | 10,000 | 350 | 30.00 | 30.00 | as planned |" in page
    assert "loss differs by 6.7%; slower than planned; memory +10% of the plan |" in page
    assert (
        "| RMSNorm | 48 | 4 | 30.0 | 4.0 | reached |" in page
        and "| rotary | 12 | 2 | 30.0 | 4.0 | 2.0 ms above |" in page
    )
    assert not gpu.is_good(records["varlen"]) and gpu.is_good(records["8b-lora-packed-plain"])
