"""``kit verify-resume`` says "exact" of what is, "no" of what is not, and leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file

from kit.cli.compare_runs import compare
from kit.cli.main import main

# A run in the eyes of the command, without torch. Capitals are for each test to replace.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
folder, steps = Path(flags["output_dir"]), int(flags["max_steps"])
(folder / "final").mkdir(parents=True, exist_ok=True)
(folder / "final/model.safetensors").write_bytes(b"weights")
strategy = {"type": "single", "num_processes": 1, "mixed_precision": "no", "device": "H100", "rehearsal": False}
strategy |= {"sharded_layers": None, "trainable_parameters": 1}
(folder / "run.json").write_text(json.dumps({"strategy": strategy, "recipe": {"deterministic": False}}))
first = max([0, *(int(path.name[5:]) for path in folder.glob("checkpoints/step-*"))]) if CONTINUES else 0
kept = (folder / "metrics.jsonl").read_text().splitlines(True)[:first] if first else []
with open(folder / "metrics.jsonl", "w", 1) as metrics:
    metrics.writelines(kept)
    for step in range(first + 1, steps + 1):
        row = {"step": step, "loss": LOSS, "grad_norm": 1, "learning_rate": 1, "seconds": time.perf_counter()}
        metrics.write(json.dumps(row) + chr(10))
        if step % int(flags["save_steps"]) == 0 or step == steps:
            checkpoint = folder / f"checkpoints/step-{step:08d}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "manifest.json").touch()
        time.sleep(PAUSE)
"""


def fake(loss="1 / step", continues=True, pause=0.2):
    return SCRIPT.replace("LOSS", loss).replace("CONTINUES", str(continues)).replace("PAUSE", str(pause))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An own place for temporary files, to see what stays there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Have the command start another script."""

    def use(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        monkeypatch.setattr("kit.cli.verify_resume.SCRIPT", path)
        return path

    return use


def flags(model_folder, chat_file, **more):
    values = {"model_name_or_path": model_folder, "dataset": chat_file, "max_length": 256, "learning_rate": 1e-2}
    values |= {"global_batch_size": 8, "method": "lora", "lora_dropout": 0.1, "eval_split_size": 6, **more}
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["single", "ddp"])
def test_a_run_that_continues_exactly_is_said_to_and_nothing_stays(
    config, model_folder, chat_file, temporary, tmp_path
):
    keep = tmp_path / "keep"
    command = [sys.executable, "-m", "kit.cli.main", "verify-resume", "--steps", "5", "--kill-after", "2"]
    # What a run's own command may hold does no harm: its folder, its length, its trackers.
    mine = flags(model_folder, chat_file, config=config, output_dir=tmp_path / "mine", max_steps=3, eval_steps=50)
    more = ["--keep", str(keep)] if config == "single" else []
    done = subprocess.run([*command, *mine, *more], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nexact: 3 steps after the kill and the final weights are equal bit for bit\n")
    assert "    continuing after step 2 of 5" in done.stdout and "2 of 3: the same, killed when" in done.stdout
    table = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit() and "loss" in line]
    assert [(row[0], row[2] == row[4], row[-1]) for row in table] == [(f"{n}", True, "none") for n in range(1, 6)]
    assert list(temporary.iterdir()) == [] and not (tmp_path / "mine").exists()
    if more:
        rows = [json.loads(line) for line in (keep / "continued/metrics.jsonl").read_text().splitlines()]
        assert sum("eval_loss" in row for row in rows) == 5
        assert (keep / "uninterrupted/checkpoints/step-00000005/manifest.json").is_file()


BROKEN = """
import runpy, sys
sys.path.insert(0, {root!r})
import kit.train.step
from pathlib import Path
folder = next(word for word in sys.argv if word.startswith("--output_dir=")).partition("=")[2]
true, again = kit.train.step.seed_everything, len(list(Path(folder).glob("checkpoints/step-*")))
kit.train.step.seed_everything = lambda seed, step, rank: true(seed + again, step, rank)
runpy.run_path({root!r} + "/recipes/finetune.py", run_name="__main__")
"""


@pytest.mark.slow
def test_other_dropout_after_a_resume_is_found(model_folder, chat_file, temporary, script, capsys):
    script(BROKEN.format(root=str(ROOT)))
    assert main(["verify-resume", *flags(model_folder, chat_file)]) == 1
    out = capsys.readouterr().out
    verdict = out.splitlines()[-1]
    assert verdict.startswith("differs from step 4 on, worst relative difference ") and " in loss, " in verdict
    assert " tensors differ, by up to " in verdict
    differences = {
        line.split()[0]: line.split()[5] for line in out.splitlines() if line[:1].isdigit() and " loss " in line
    }
    assert differences == {**dict.fromkeys("123", "none"), **dict.fromkeys("456", "loss")}
    assert list(temporary.iterdir()) == []


def test_a_script_that_begins_again_has_not_continued_though_all_is_equal(temporary, script, capsys):
    script(fake(continues=False))
    assert main(["verify-resume"]) == 1
    out = capsys.readouterr().out
    assert out.count("none\n") == 7 and out.endswith("not continued: the run began at step 1 again\n")


def test_runs_that_differ_on_a_gpu_get_the_hint_that_helps(temporary, script, capsys):
    script(fake(loss="1 + os.getpid() * 1e-9"))
    assert main(["verify-resume", "--steps=3"]) == 1
    out = capsys.readouterr().out
    assert "differs from step 1 on" in out and "Step 1 is before the kill: two runs differ" in out
    assert out.endswith("try --deterministic true\n")
    script(fake(loss="1 / step"))
    assert main(["verify-resume", "--steps=3"]) == 0
    assert "deterministic" not in capsys.readouterr().out


def test_a_run_too_short_to_be_killed_is_told_with_a_longer_one(temporary, script, capsys):
    """However fast one looks: the last checkpoint is there before the one that is waited for."""
    script(fake(pause=0).replace("range(first + 1, steps + 1)", "range(steps, 0, -1)"))
    assert main(["verify-resume"]) == 2
    out, err = capsys.readouterr()
    assert out.count("once more") == 3 and err.startswith("error: --steps: 6 are done") and "--steps 24" in err
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        (
            "print('error: seed: of no use\\n    -> another\\n'); sys.exit(1)",
            2,
            "error: seed: of no use\n    -> another\n",
        ),
        ("print('error: rank 0: step 3: loss nan\\nTraceback'); sys.exit(1)", 1, "error: rank 0: step 3: loss nan\n"),
        ("os.kill(os.getpid(), 9)", 1, "error: run 1 of 3 was ended by signal 9\n"),
        (
            "print('rank 0 failed:'); 1 / 0",
            1,
            "ZeroDivisionError: division by zero\nerror: run 1 of 3 ended with status 1\n",
        ),
    ],
)
def test_what_a_failed_run_said_of_itself_is_said_and_nothing_of_its_launcher(
    end, status, message, temporary, script, capsys
):
    script(f"import os, sys\nprint('loading')\nsys.stdout.flush()\n{end.replace('; ', chr(10))}\n")
    assert main(["verify-resume"]) == status
    assert capsys.readouterr().err.endswith(message)
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_mistake_found_under_a_launcher_is_one_block_and_status_2(model_folder, tmp_path, temporary, capsys):
    (tmp_path / "data.jsonl").write_text('{"messages": 3}\n')
    assert main(["verify-resume", "--config=ddp", *flags(model_folder, tmp_path / "data.jsonl")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("\nerror: ") and "data.jsonl:1" in err and len(err.strip().splitlines()) <= 2


def test_wrong_flags_are_told_at_once_and_nothing_is_written(temporary, tmp_path, capsys):
    keep = tmp_path / "mine"
    keep.mkdir()
    (keep / "file").touch()
    words = [
        "--steps",
        "6",
        "--kill_after",
        "6",
        "--keep",
        str(keep),
        "--learning_rat",
        "1",
        "--dry_run",
        "--seed",
        "x",
    ]
    assert main(["verify-resume", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: 5 problems\n")
    assert "--kill_after: found '6'; expected whole number from 1 to 5" in err
    for message in ("--keep: ", "did you mean 'learning_rate'", "--dry_run: ", "--seed: found 'x'"):
        assert message in err
    assert list(temporary.iterdir()) == [] and [path.name for path in keep.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "nope"], "--recipe: no recipe 'nope'"),
        (["--steps", "1"], "--steps: found '1'; expected whole number from 2"),
        (["--steps"], "--steps: no value"),
        (["--kill-after", "0"], "--kill_after: found '0'; expected whole number from 1 to 5"),
        (["--step", "5"], "--step: unknown flag\n    -> did you mean 'steps'?"),
        (["--kill-afterr", "2"], "--kill_afterr: unknown flag\n    -> did you mean 'kill_after'?"),
        (["--max_step", "5"], "--max_step: unknown flag\n    -> did you mean 'max_steps'?"),
        (["--keeep", "x"], "--keeep: unknown flag\n    -> did you mean 'keep'?"),
        (["--config", "nope"], "--config: no config 'nope'"),  # this one the script itself tells
    ],
)
def test_one_mistake_is_one_error(words, message, temporary, capsys):
    assert main(["verify-resume", *words]) == 2
    assert capsys.readouterr().err.strip().startswith(f"error: {message}")
    assert list(temporary.iterdir()) == []


def test_flags_that_are_decided_here_are_named_and_no_others(temporary, script, model_folder, chat_file, capsys):
    script(fake())
    pasted = {"output_dir": "runs/mine", "max_steps": 900, "logging_steps": 1, "report_to": "wandb", "seed": 3}
    pasted |= {"eval_steps": 50, "max_eval_samples": 2, "dry_run": "false", "overwrite_output_dir": "true"}
    assert main(["verify-resume", *flags(model_folder, chat_file, **pasted)]) == 0
    out = capsys.readouterr().out
    named = "output_dir, max_steps, report_to, eval_steps, overwrite_output_dir"
    assert out.startswith(f"note: decided here, not by your flags: {named}\n"), out
    assert main(["verify-resume", *flags(model_folder, chat_file)]) == 0
    assert "note:" not in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_processes_orphans_included(number, temporary, script, tmp_path):
    """Two below the script: one in a session of its own, one that has lost its parent; both deaf to SIGTERM."""
    deaf = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    path = script(f"""
import os, subprocess, sys, time
pids = [os.getpid(), subprocess.Popen([sys.executable, "-c", {deaf!r}], start_new_session=True).pid]
code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {deaf!r}], stdout=-3).pid)"
pids.append(int(subprocess.check_output([sys.executable, "-c", code])))
open({str(tmp_path / "pids.partial")!r}, "w").write(" ".join(map(str, pids)))
os.rename({str(tmp_path / "pids.partial")!r}, {str(tmp_path / "pids")!r})
time.sleep(600)
""")
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pathlib import Path
import kit.cli.main, kit.cli.verify_resume
kit.cli.verify_resume.SCRIPT = Path({str(path)!r})
sys.exit(kit.cli.main.main(["verify-resume"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "pids").exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 3 and all(map(runs, pids))
        process.send_signal(number)
        process.send_signal(signal.SIGINT)  # who is in a hurry must not be left with half of it
        assert process.wait(120) == 130
        assert not any(map(runs, pids)) and list(temporary.iterdir()) == []
    finally:
        process.kill()


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def folders(tmp_path):
    """Two finished runs of 4 steps that are equal, and what the second had logged when it was killed after step 3."""

    def rows(seconds):
        for step in range(1, 5):
            yield {"step": step, "loss": 1 / step, "grad_norm": 0.1, "learning_rate": 0.1, "seconds": step + seconds}
            yield {"step": step, "eval_loss": 2 / step}

    whole, killed = list(rows(0.0)), list(rows(0.5))
    continued = killed[:4] + list(rows(0.25))[4:]  # it goes on after step 2
    for name, lines in (("whole", whole), ("continued", continued)):
        (tmp_path / name / "final").mkdir(parents=True)
        write_rows(tmp_path / name, lines)
        save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / name / "final/model.safetensors")
    return tmp_path / "whole", tmp_path / "continued", killed[:6]


def write_rows(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_equal_runs_are_exact(folders):
    comparison = compare(*folders)
    assert comparison.result == "exact"
    assert comparison.verdict == "exact: 2 steps after the kill and the final weights are equal bit for bit"


@pytest.mark.parametrize("name", ["loss", "grad_norm", "learning_rate", "eval_loss"])
@pytest.mark.parametrize("step", [3, 2])
def test_one_bit_in_one_measure_is_a_difference(folders, name, step):
    rows = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["step"] == step and name in row)
    row[name] *= 1 + 2.0**-52
    write_rows(folders[1], rows)
    before_kill = rows[:4] + folders[2][4:]
    comparison = compare(*folders[:2], before_kill)
    assert comparison.result == "differs"
    assert comparison.verdict.startswith(f"differs from step {step} on, worst relative difference ")
    assert f"e-16 in {name}; final weights: equal" in comparison.verdict
    assert ("before the kill" in comparison.verdict) == (step == 2)


def test_one_bit_in_the_final_weights_is_a_difference(folders):
    file = folders[1] / "final/model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.tensor([1.0, 1.0 + 2.0**-23])}, file)
    comparison = compare(*folders)
    assert comparison.result == "differs"
    assert comparison.verdict == "differs in the final weights: 1 of 2 tensors differ, by up to 1.2e-07"
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, file, metadata={"format": "pt"})
    assert compare(*folders).result == "exact"
    file.unlink()
    assert compare(*folders).result == "differs"


def test_a_missing_step_is_a_difference(folders):
    rows = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    write_rows(folders[1], [row for row in rows if row["step"] != 3])
    comparison = compare(*folders)
    assert comparison.result == "differs" and "differs from step 3 on" in comparison.verdict


def test_a_run_with_no_step_left_after_the_kill_proves_nothing(folders):
    rows = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    comparison = compare(*folders[:2], rows)
    assert comparison.result == "not continued"
