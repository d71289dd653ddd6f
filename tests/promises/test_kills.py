"""A run that is killed with SIGKILL anywhere resumes bit for bit."""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from functools import partial

import pytest
import torch
from helpers import matrix
from safetensors.torch import load_file

from kit.checkpoint.manifest import list_checkpoints, verify

pytestmark = pytest.mark.slow

FLAGS = {"method": "lora", "lora_dropout": 0.1, "save_total_limit": 2}


def everything(run):
    """All that two equal runs must share: every number of every step, and all that trains, with its moments."""
    unlike = {
        "tokens_per_second",
        "tflops_per_second",
        "seconds",
        "peak_memory_bytes",
        "data_wait_share",
    }
    unlike |= {
        "highest_peak_memory_bytes",
        "ranks",
        "gpu_utilisation",
    }
    rows = [{key: value for key, value in row.items() if key not in unlike} for row in run.rows]
    newest = list_checkpoints(run.folder / "checkpoints")[-1]
    assert verify(newest) == []
    # By tensor: a resumed optimiser lists its moments in another order.
    tensors = {
        (path.name, name): (tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for path in newest.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    state = json.loads((newest / "state.json").read_text())
    del state["seconds"]
    final = {path.name: path.read_bytes() for path in (run.folder / "final").glob("*.safetensors")}
    assert tensors and final
    return rows, tensors, state, final


# A kill at every file operation of a save


def die_at(folder, number, log, rank):
    """In the child: SIGKILL before the ``number``-th operation on a file under ``folder``; ``log`` lists them."""
    count = 0

    def point(name, path):
        nonlocal count
        path = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if not path.startswith(folder):
            return
        count += 1
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{name} {path.removeprefix(folder)}\n".encode())
        os.close(file)
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, args):
        if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
            point("open", args[0])
        elif event in ("os.remove", "os.rmdir") and args[1] != -1:  # rmtree names what is in an open folder
            point(event, os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), args[0]))
        elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            point(event, args[0])

    fsync = os.fsync

    def synced(file):
        point("fsync", os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"))
        fsync(file)

    os.fsync = synced
    sys.addaudithook(audit)


@pytest.mark.parametrize("stride", matrix([3], always=0, rest=[1]))
def test_kill_9_at_every_write_point_of_a_save(finetune, stride):
    """The second save of four, which also deletes the first one's checkpoint. CI kills at every third point."""
    flags = FLAGS | {"max_steps": 4, "save_steps": 1, "save_total_limit": 1}
    log = finetune.folder / "points"
    whole = finetune("whole", prepare=partial(die_at, str(finetune.folder / "whole/checkpoints"), 0, log), **flags)
    expected = everything(whole)
    names = log.read_text().splitlines()
    published = re.compile(r"os.rename /\.step-\d{8}\.partial")  # the folder, not the files in it
    renames = [number for number, name in enumerate(names, 1) if published.fullmatch(name)]
    assert len(renames) == 4
    start = renames[0] + 1
    end = renames[2]  # the third save's: the old checkpoint's deletion lies before it
    points = range(start, end + 1, stride)
    assert {name.split()[0] for name in names[start - 1 : end]} >= {
        "open",
        "fsync",
        "os.mkdir",
        "os.rename",
        "os.remove",
    }

    for number in points:
        log.unlink()
        folder = finetune.folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        killed = finetune("run", prepare=partial(die_at, str(folder / "checkpoints"), number, log), **flags)
        assert killed.status == -signal.SIGKILL, killed.output
        newest = list_checkpoints(folder / "checkpoints")[-1]
        assert verify(newest) == []
        continued = finetune.ok("run", **flags)
        assert f"continuing after step {int(newest.name[5:])} of 4" in continued.output, names[number - 1]
        assert everything(continued) == expected, names[number - 1]
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000004"]
    print(f"{len(points)} kills:", *(name.split(" ", 1)[0] for name in names[start - 1 : end]))


# Kills at any time

CASES = {
    "lora, accumulation": ("single", 1, {"gradient_checkpointing": "true"}),
    "qlora, packing": ("single", 1, {"method": "qlora", "packing": "true", "global_batch_size": 4}),
    "ddp 2": ("ddp", 2, {"packing": "true", "global_batch_size": 4, "per_device_train_batch_size": 1}),
    "ddp 3": ("ddp", 3, {"global_batch_size": 12}),
    "fsdp2 2, full": ("fsdp", 2, {"method": "full", "lora_dropout": 0, "learning_rate": 1e-3}),
}
STEPS = 36


@pytest.mark.parametrize("case", matrix(list(CASES)[1:4:2] + list(CASES)[4:], always=0, rest=CASES))
def test_random_kills(finetune, chat_file, request, case):
    """Of all ranks at once, as a machine dies: while they train, evaluate, save, or start."""
    config, processes, changes = CASES[case]
    num_kills = max(1, request.config.getoption("--kills") // len(CASES))
    flags = FLAGS | {"config": config, "max_steps": STEPS, "save_steps": 2, "eval_steps": 5, "max_eval_samples": 6}
    flags |= {"eval_dataset": chat_file, **changes}
    whole = finetune.ok("whole", processes, **flags)
    expected = everything(whole)
    folder, rng, survived, round_ = finetune.folder / "run", random.Random(case), 0, 0
    while survived < num_kills:
        round_ += 1
        # Some ten kills bring a run to its end; then it begins anew.
        first = len(finetune_rows(folder))
        after, pause = min(first + rng.randint(0, 8), STEPS + 6), rng.uniform(0, 0.15)
        killed = finetune("run", processes, kill(folder, after, pause), **flags)
        assert killed.status in (0, -signal.SIGKILL), killed.output
        survived += killed.status != 0
        if killed.status == 0:
            assert everything(killed) == expected, f"{case}: after {survived} kills"
            shutil.rmtree(folder)
    if folder.exists():
        assert everything(finetune.ok("run", processes, **flags)) == expected, f"{case}: after {survived} kills"
    print(f"{case}: {survived} kills survived in {round_} starts")


def finetune_rows(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def kill(folder, after, pause):
    """SIGKILL to all ranks when ``after`` lines are in the metrics, and ``pause`` seconds have passed."""

    def meanwhile(children):
        if len(finetune_rows(folder)) < after:
            return False
        time.sleep(pause)
        for child in children:
            child.kill()
        return True

    return meanwhile
