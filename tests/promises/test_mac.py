"""On an imitation of Apple's GPU (tests/fake_mps.py), which has no float64, a run learns what it learns on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from helpers import ROOT, matrix

pytestmark = pytest.mark.slow

CASES = [
    {"method": "full", "predict_with_generate": True},
    {"method": "lora", "packing": True},
]


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, finetune: Any, fp32: dict[str, str]) -> Any:
    """Runs the script as its own process on the imitation, and returns its rows of metrics and output."""
    if not fake_cuda.compiler():
        pytest.skip("NO C++ COMPILER: NOTHING WAS RUN ON AN IMITATION OF A MAC. Install g++ or clang++")
    own = tmp_path_factory.getbasetemp()
    finetune.defaults |= {"config": fp32["single"], "eval_dataset": finetune.defaults["dataset"], "max_steps": 4}
    finetune.defaults |= {"lr_scheduler_type": "constant", "eval_strategy": "no", "max_new_tokens": 8}

    def run(output: str, **flags: Any) -> tuple[list[dict[str, Any]], str]:
        folder = tmp_path / output
        values = finetune.defaults | {"output_dir": folder} | flags
        env = os.environ | {
            "FAKE_MPS_FOLDER": str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own),
            "FAKE_MPS_REPORT": f"{folder}.json",
        }
        command = [sys.executable, str(ROOT / "tests/fake_mps.py"), str(ROOT / "recipes/finetune.py")]
        command += [word for name, value in values.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], done.stdout

    return run


def numbers(rows: list[dict[str, Any]], *keys: str) -> list[float]:
    return [row[key] for row in rows for key in keys if key in row]


@pytest.mark.parametrize("case", matrix([(CASES[0],)], rest=[(CASES[1],)]))
def test_losses_are_those_of_the_cpu_and_a_run_continues_with_the_same_bits(run, finetune, tmp_path, case):
    on_mac, output = run("mac", **case)
    on_cpu = finetune.ok("cpu", **case)
    assert "Single on MPS" in output
    for keys in (("loss", "eval_loss"), ("grad_norm",), ("eval_exact_match",)):
        assert numbers(on_mac, *keys) == pytest.approx(numbers(on_cpu.rows, *keys), rel=1e-6), keys
    report = json.loads((tmp_path / "mac.json").read_text())
    assert "aten::mm.out" in report["operators"]
    assert not report["without_kernel"]  # by torch's own table, MPS computes each operator
    run("parted", **case, max_steps=2)
    parted, _ = run("parted", **case)
    assert numbers(parted, "loss", "grad_norm")[-4:] == numbers(on_mac, "loss", "grad_norm")[-4:]
