"""``kit report`` writes the page of a run that was killed or still goes on, and refuses a folder without a run."""

import json
from dataclasses import asdict

import pytest

from kit.cli.main import main
from kit.config.recipe import Recipe
from kit.strategy.topology import ActualStrategy


@pytest.fixture
def folder(tmp_path):
    """A run that was killed while it wrote the line of its third step."""
    strategy = ActualStrategy(
        type="single",
        config="single",
        num_processes=1,
        mixed_precision="no",
        device="cpu",
        rehearsal=False,
        sharded_layers=None,
        offload=False,
        num_threads=1,
        trainable_parameters=12,
    )
    data = {"fingerprint": "ab", "train": {"num_samples": 7}, "evaluation": None}
    run = {
        "recipe": Recipe(model_name_or_path="m", dataset="d.jsonl", max_steps=9).model_dump(mode="json"),
        "strategy": asdict(strategy),
        "data": data | {"sources": [{"name": "d", "num_samples": 7}]},
        "versions": {"torch": "2.13.0"},
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(json.dumps(run))
    speed = {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 9.0, "peak_memory_bytes": 2**30}
    rows = [json.dumps({"step": step, "loss": 3.0 / step, **speed}) for step in (1, 2)]
    (tmp_path / "run/metrics.jsonl").write_text("\n".join([*rows, '{"step": 3, "lo']))
    return tmp_path / "run"


@pytest.mark.slow
def test_it_is_written_of_a_run_as_far_as_it_has_come(folder, capsys):
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"report: {folder}/report.html\n"
    assert "2 steps so far" in (folder / "report.html").read_text()
    with (folder / "metrics.jsonl").open("a") as file:  # it goes on
        file.write('\n{"step": 4, "loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 9.0, ')
        file.write('"peak_memory_bytes": 1}\n')
    assert main(["report", str(folder)]) == 0
    assert "4 steps so far" in (folder / "report.html").read_text()


def test_a_folder_without_a_run_is_refused_and_stays_as_it_was(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {tmp_path}/run.json: no record of a run")
    assert list(tmp_path.iterdir()) == []
