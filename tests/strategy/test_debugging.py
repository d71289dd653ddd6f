"""``--debug_distributed`` leaves logs, stacks and collectives of each rank beside the run, and computes the same."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from helpers import ROOT

from kit.errors import UserError
from kit.strategy import debugging
from kit.strategy.strategies import DDP, FSDP2


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return os.environ


def test_what_the_user_has_set_stays(environment, tmp_path):
    environment["TORCH_FR_BUFFER_SIZE"] = "7"
    debugging.set_variables(tmp_path, FSDP2)
    assert environment["TORCH_FR_BUFFER_SIZE"] == "7" and environment["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl-")


def test_under_ddp_torch_does_not_compare_collectives_because_it_would_crash(environment, tmp_path):
    debugging.set_variables(tmp_path, DDP)
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == "INFO"


def test_the_folder_is_not_in_the_run_which_must_be_empty_to_begin():
    assert str(debugging.folder_beside("runs/mine/")) == "runs/mine.debug"


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "mine.debug").touch()
    with pytest.raises(UserError, match=r"debug_distributed: .*mine\.debug: File exists"):
        debugging.record(tmp_path / "mine.debug", 60.0)


@pytest.mark.parametrize("name", ["mine.debug", "mine.debug/rank-0.log", "mine.debug/rank-0.stacks.txt"])
def test_nothing_is_written_through_a_link(tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere if name == "mine.debug" else elsewhere / "file")
    if name.endswith("txt"):
        debugging.write_state(link.parent, 0)
        assert "test_nothing_is_written" in link.read_text() and not link.is_symlink()
    else:
        with pytest.raises(UserError, match=rf"debug_distributed: {link}: "):
            debugging.record(tmp_path / "mine.debug", 60.0)
    assert (elsewhere / "file").read_text() == "precious" and os.listdir(elsewhere) == ["file"]


def test_the_state_of_a_rank_names_what_each_thread_does(tmp_path):
    def waits_here():
        event.wait()

    event = threading.Event()
    thread = threading.Thread(target=waits_here)
    thread.start()
    debugging.write_state(tmp_path, 3)
    event.set()
    thread.join()
    assert "in waits_here" in (tmp_path / "rank-3.stacks.txt").read_text()


RANK = """
import os, sys, time
from pathlib import Path
from kit.strategy import debugging
folder = Path(sys.argv[1])
debugging.set_variables(folder, "fsdp2")
debugging.record(folder, stall_seconds=2)
import torch, torch.distributed as distributed
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
distributed.all_reduce(torch.ones(4))
os.write(2, b"from C++\\n")
def hangs():
    time.sleep(600)
hangs()
"""


@pytest.mark.slow
def test_a_rank_that_hangs_says_where_by_itself_and_when_asked(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True)
    try:
        stacks = tmp_path / "rank-0.stacks.txt"

        def wait_for_stacks():
            deadline = time.monotonic() + 60
            while not (stacks.exists() and "in hangs" in stacks.read_text()):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)

        wait_for_stacks()
        collectives = json.loads((tmp_path / "rank-0.collectives.json").read_text())["entries"]
        assert "all_reduce" in collectives[-1]["profiling_name"] and collectives[-1]["input_sizes"] == [[4]]
        stacks.unlink()
        (tmp_path / debugging.ASK).touch()
        wait_for_stacks()
    finally:
        process.kill()
    assert "from C++" in process.communicate()[1] and "from C++" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("config", ["ddp", "fsdp"])
def test_a_run_computes_the_same_and_each_rank_has_a_log(tmp_path, config):
    losses = []
    for debugs in ("false", "true"):
        flags = f"--config {config} --num_processes 2 --max_steps 4 --logging_steps 1"
        flags += " --eval_strategy no --eval_on_start false"
        command = [sys.executable, "recipes/finetune.py", *flags.split(), "--output_dir", str(tmp_path / debugs)]
        done = subprocess.run([*command, "--debug_distributed", debugs], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rows = map(json.loads, (tmp_path / debugs / "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"].hex() for row in rows if "loss" in row])
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert "step 4/4" in (tmp_path / "true.debug/rank-0.log").read_text()
    assert (tmp_path / "true.debug/rank-1.log").exists() and not (tmp_path / "false.debug").exists()
