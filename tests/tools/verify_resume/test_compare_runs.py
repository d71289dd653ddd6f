"""Two runs are equal if every bit is, and steps were done after the kill."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kit.tools.verify_resume.compare_runs import compare_runs


@pytest.fixture
def folders(tmp_path):
    """Two finished runs of 4 steps that are equal; the second was continued after step 2."""
    for name in ("whole", "continued"):
        (tmp_path / name / "final").mkdir(parents=True)
        rows = []
        for step in range(1, 5):
            rows.append({"step": step, "loss": 1 / step, "grad_norm": 0.1, "learning_rate": 0.1})
            rows.append({"step": step, "eval_loss": 2 / step})
        write_rows(tmp_path / name, rows)
        (tmp_path / name / "run.json").write_text('{"starts": [{"step": 0}, {"step": 2}]}')
        save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / name / "final/model.safetensors")
    return tmp_path / "whole", tmp_path / "continued"


def write_rows(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_equal_runs_are_exact(folders):
    comparison = compare_runs(*folders)
    assert comparison.result == "exact"
    assert comparison.verdict == "exact: 2 steps after the kill and the final weights are equal bit for bit"


def test_one_bit_in_one_measure_is_a_difference(folders):
    text = (folders[1] / "metrics.jsonl").read_text()
    for name, step in (("loss", 3), ("grad_norm", 3), ("learning_rate", 2), ("eval_loss", 3)):
        rows = [json.loads(line) for line in text.splitlines()]
        row = next(row for row in rows if row["step"] == step and name in row)
        row[name] *= 1 + 2.0**-52
        write_rows(folders[1], rows)
        comparison = compare_runs(*folders)
        assert comparison.result == "differs" and comparison.verdict.startswith(f"differs from step {step} on")
        assert any(line.startswith(f"{step} ") and line.endswith(name) for line in comparison.table)
        assert ("before the kill" in comparison.verdict) == (step == 2)


def test_one_bit_in_the_final_weights_is_a_difference(folders):
    file = folders[1] / "final/model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.tensor([1.0, 1.0 + 2.0**-23])}, file)
    comparison = compare_runs(*folders)
    assert comparison.result == "differs"
    assert comparison.verdict == "differs in the final weights alone"
    file.unlink()
    assert compare_runs(*folders).result == "differs"


def test_a_run_that_began_again_or_had_no_step_left_proves_nothing(folders):
    for step in (0, 4):
        (folders[1] / "run.json").write_text(json.dumps({"starts": [{"step": step}]}))
        assert compare_runs(*folders).result == "not continued"
