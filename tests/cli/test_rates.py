"""``kit rates`` runs each rate once, on the batches of the real run, and leaves the real run's folder alone."""

import json

import pytest

from kit.cli.main import main

# A run in the eyes of the command, without torch: its loss falls the faster, the higher the rate, up to 0.5.
SCRIPT = """
import json, math, sys
from pathlib import Path
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
folder, steps, rate = Path(flags["output_dir"]), int(flags["max_steps"]), float(flags["learning_rate"])
if FAILS: print("error: rank 0: no"); sys.exit(1)
folder.mkdir(parents=True)
(folder / "checkpoints").mkdir()
(folder / "final").mkdir()
(folder / "flags.json").write_text(json.dumps(flags))
rows = [{"step": step, "loss": 4 * math.exp(-rate * step), "learning_rate": rate} for step in range(1, steps + 1)]
record = {"finished_steps": steps}
if rate > 0.5:
    rows, record = [*rows[:2], {"step": 3, "nonfinite": "loss nan"}], {}
(folder / "run.json").write_text(json.dumps(record))
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
if rate > 0.5: print("step 3: loss nan"); sys.exit(1)
"""


@pytest.fixture
def rates(script, flags, tmp_path, temporary, monkeypatch, capsys):
    """Types ``kit rates`` with these rates, and returns its status and what it printed."""
    monkeypatch.chdir(tmp_path)

    def rates(text, *more, fails="False", output_dir="out"):
        script(SCRIPT.replace("FAILS", fails))
        words = flags(output_dir=output_dir, max_steps=90, lr_scheduler_type="cosine_with_min_lr", min_lr_rate=0.1)
        status = main(["rates", *words, *more, "--rates", text])
        return status, "".join(capsys.readouterr())

    return rates


def flags_of(folder):
    return json.loads((folder / "flags.json").read_text())


def test_each_rate_runs_once_with_the_flags_of_the_run(rates, tmp_path, temporary):
    status, printed = rates("1e-1,1e-2")
    assert status == 0 and "50 steps of 8 samples, 3 of them warm-up, on the same batches" in printed
    assert "lowest with 0.1" in printed and "kit report" in printed
    trials = [flags_of(tmp_path / "out-rates" / name) for name in ("0.1", "0.01")]
    for trial in trials:
        assert (trial["lora_dropout"], trial["max_steps"], trial["eval_strategy"]) == ("0.1", "50", "no")
        assert (trial["lr_scheduler_type"], trial["warmup_steps"]) == ("constant_with_warmup", "3")
        assert trial["min_lr_rate"] == "none"  # which a constant rate does not have
    differing = {key for key in trials[0] if trials[0][key] != trials[1][key]}
    assert differing == {"learning_rate", "output_dir"}
    assert not (tmp_path / "out").exists() and list(temporary.iterdir()) == []
    assert not list((tmp_path / "out-rates").glob("*/final")) + list((tmp_path / "out-rates").glob("*/checkpoints"))


def test_the_same_command_continues_and_more_rates_are_added(rates, tmp_path):
    assert rates("0.1,0.2", fails="rate == 0.2")[0] == 1
    first = (tmp_path / "out-rates/0.1/flags.json").stat().st_mtime_ns
    (tmp_path / "out-rates/0.2").mkdir()  # what a kill leaves
    status, printed = rates("0.1,0.2")
    assert status == 0 and "1 of 1: learning rate 0.2" in printed
    status, printed = rates("0.01")
    assert status == 0 and "1 of 1: learning rate 0.01" in printed
    assert all(f"\n{rate} " in printed for rate in ("0.01", "0.1", "0.2"))
    assert (tmp_path / "out-rates/0.1/flags.json").stat().st_mtime_ns == first
    status, printed = rates("0.1", "--lora_r", "4")
    assert status == 2 and "other values of lora_r" in printed
    assert rates("0.1", "--lora_r", "4", output_dir="out-2")[0] == 0  # as it was typed


def test_a_rate_that_diverges_is_marked_and_the_others_go_on(rates, tmp_path):
    status, printed = rates("0.1,0.9,1")
    assert status == 0 and printed.count("not finite at step 3") == 2
    assert "all are done" in rates("0.1,0.9,1")[1]  # nor is it tried again


def test_mistakes_are_reported_before_anything_is_written(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    words = ["--rates", "1e-4,2", "--sweep_steps", "1", "--learning_rte", "1"]
    assert main(["rates", *flags(output_dir="out", max_steps=90), *words]) == 2
    err = capsys.readouterr().err
    for message in ("--rates: found [0.0001, 2.0]", "--sweep_steps: found 1", "mean 'learning_rate'?"):
        assert message in err
    assert set(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_trials_train_on_the_batches_of_the_real_run(tmp_path, monkeypatch, finetune):
    monkeypatch.chdir(tmp_path)
    run = finetune.ok(
        "real", method="lora", learning_rate=1e-2, max_steps=8, warmup_steps=1, lr_scheduler_type="constant"
    )
    words = [f"--{key}={value}" for key, value in finetune.defaults.items() if key not in ("max_steps", "warmup_steps")]
    words += ["--method=lora", "--max_steps=8", "--warmup_steps=1", "--output_dir=out"]
    assert main(["rates", *words, "--sweep_steps", "3", "--rates", "1e-2"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out-rates/0.01/metrics.jsonl").read_text().splitlines()]
    assert [float(row["loss"]).hex() for row in rows if "loss" in row] == run.losses[:3]
