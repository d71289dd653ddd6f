"""A model of the hub, as it lies in the cache after a download: it starts, and another commit of it is another run."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow

NAME, COMMITS = "someone/small", ("a" * 40, "b" * 40)


@pytest.fixture
def hub(tmp_path, model_folder):
    """The cache of the hub with one model in two commits, and what makes one of them ``main``."""
    home = tmp_path / "home"
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    for commit in COMMITS:
        shutil.copytree(model_folder, repository / "snapshots" / commit)

    def make_main(commit):
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs/main").write_text(commit)
        return home

    return make_main


@pytest.mark.long
def test_a_run_is_known_by_the_commit_of_its_model(hub, chat_file, tmp_path):
    def start(commit, *more):
        words = [f"--model_name_or_path={NAME}", f"--dataset={chat_file}", f"--output_dir={tmp_path / 'run'}"]
        words += ["--max_steps=1", "--global_batch_size=2", "--max_length=256", *more]
        env = {**os.environ, "HF_HOME": str(hub(commit)), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(ROOT / "recipes/finetune.py"), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    first = start(COMMITS[0])
    assert first.returncode == 0, first.stderr
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["identity"]["model_fingerprint"] == COMMITS[0]
    other = start(COMMITS[1])
    assert other.returncode == 2 and "the weights of model_name_or_path changed" in other.stderr
    assert f"commit {COMMITS[1]}, not the earlier one, which --model_revision {COMMITS[0]} selects" in other.stderr
    again = start(COMMITS[1], f"--model_revision={COMMITS[0]}")
    assert again.returncode == 0, again.stderr
