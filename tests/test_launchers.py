"""The files in ``launchers/`` work: flags and fields are right, and Slurm's requeues a run."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml
from helpers import ROOT

from kit.config.command_line import read_command_line
from kit.config.paths import ACCELERATE_CONFIGS

FOLDER = ROOT / "launchers"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.is_file())


def text_of(name):
    return (FOLDER / name).read_text()


def kubernetes():
    return {entry["kind"]: entry for entry in yaml.safe_load_all(text_of("kubernetes.yaml"))}


def skypilot():
    return yaml.safe_load(text_of("skypilot.yaml"))


def flags_of(name):
    """The flags of the run in a file, and the name of its Accelerate config."""
    if name == "slurm.sh":
        flags = shlex.split(re.search(r"^flags=\((.*)\)$", text_of(name), re.MULTILINE)[1])
        return flags, re.search(r"^config=accelerate_configs/(\w+)\.yaml$", text_of(name), re.MULTILINE)[1]
    if name == "kubernetes.yaml":
        flags = kubernetes()["TrainJob"]["spec"]["trainer"]["args"]
        return flags, flags[flags.index("--config") + 1]
    if name == "skypilot.yaml":
        envs = skypilot()["envs"]
        return shlex.split(envs["FLAGS"]), envs["CONFIG"].removeprefix("accelerate_configs/").removesuffix(".yaml")
    assert name == "ray_train.py"
    config = re.search(r'^CONFIG = CLONE / "accelerate_configs/(\w+)\.yaml"$', text_of(name), re.MULTILINE)[1]
    return ast.literal_eval(re.search(r"^FLAGS = (\[.*?\])$", text_of(name), re.MULTILINE | re.DOTALL)[1]), config


def test_the_flags_and_the_config_of_each_exist():
    for name in FILES:
        flags, config = flags_of(name)
        request = read_command_line(flags)
        # else a run that was cut off would begin again
        assert not request.problems and request.recipe.save_steps, name
        assert (ACCELERATE_CONFIGS / f"{config}.yaml").is_file(), name


def test_skypilot_starts_the_run_again_after_a_stop_by_signal():
    from kit.failures.exits import STOPPED

    assert skypilot()["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    assert set(re.findall(r"\$(SKYPILOT_\w+)", skypilot()["run"])) == {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"}


class Cluster:
    """Slurm as one machine with two places for ranks. ``job`` starts the script as Slurm would start its batch step."""

    PROGRAMS = {  # noqa: RUF012
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "scontrol": 'if [ "$1" = show ]; then hostname; else echo "$@" >> "$REQUEUED"; fi',
    }

    def __init__(self, folder, output_dir, flags):
        self.folder, self.requeued = folder, folder / "requeued"
        self.requeued.touch()
        (folder / "bin").mkdir()
        for name, body in self.PROGRAMS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / "bin" / name).chmod(0o755)
        (folder / "cpu.yaml").write_text("distributed_type: MULTI_GPU\nuse_cpu: true\nnum_processes: 2\n")
        of_file = "--recipe qwen3-32b-full --per_device_train_batch_size 1 --dataset my.jsonl --save_steps 200"
        edits = {
            "source .venv/bin/activate": ":",
            "output_dir=runs/slurm": f"output_dir={output_dir}",
            "config=accelerate_configs/fsdp.yaml": f"config={folder / 'cpu.yaml'}",
            f"flags=({of_file})": f"flags=({flags})",
        }
        script = text_of("slurm.sh")
        for old, new in edits.items():
            assert script.count(old) == 1, old
            script = script.replace(old, new)
        self.script = folder / "slurm.sh"
        self.script.write_text(script)

    def job(self):
        env = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        env |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
        env |= {"SLURM_JOB_NODELIST": "here", "REQUEUED": str(self.requeued)}
        log = (self.folder / "job.log").open("a")
        return subprocess.Popen(["bash", str(self.script)], env=env, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.slow
@pytest.mark.long
def test_a_slurm_job_at_its_limit_saves_is_queued_again_and_finishes(tmp_path):
    output = tmp_path / "run"
    cluster = Cluster(tmp_path, output, "--max_steps 60 --eval_strategy no --eval_on_start false --logging_steps 1")
    job = cluster.job()
    metrics = output / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"step": 3,' in metrics.read_text()):
        assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "job.log").read_text()
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)  # --signal=B:USR1@300: to the batch script, and to nothing else
    status = job.wait(60)
    text = (tmp_path / "job.log").read_text()
    done = json.loads((output / "run.json").read_text())["interrupted"]
    assert status == 0 and 3 <= done < 60 and "SIGUSR1: stopping and saving" in text
    assert cluster.requeued.read_text().split() == ["requeue", "7"]
    assert cluster.job().wait(120) == 0
    text = (tmp_path / "job.log").read_text()
    assert f"continuing after step {done} of 60" in text and (output / "final").is_dir()
    assert cluster.requeued.read_text().split() == ["requeue", "7"]  # a run that finished is not queued again
