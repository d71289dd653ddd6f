"""Damaged and full disks, through the real script."""

import resource
import shutil
import signal
from functools import partial

import pytest
from helpers import matrix, signal_in_step

from kit.checkpoint.manifest import list_checkpoints, verify

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_bit_that_flipped_costs_that_checkpoint_only(finetune):
    """Two ranks share the hashing, and both go back. Each kind of damage: tests/checkpoint/test_manifest.py."""
    flags = {"method": "lora", "lora_dropout": 0.1, "max_steps": 4, "save_steps": 2, "config": "ddp"}
    run = finetune.ok("run", 2, **flags)
    record = run.folder / "run.json"
    record.write_text(record.read_text().replace('"finished_steps": 4', '"finished_steps": 0'))
    shutil.rmtree(run.folder / "final")
    newest = run.folder / "checkpoints/step-00000004"
    file = next(newest.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    again = finetune.ok("run", 2, **flags)
    assert again.output.count(f"skipping {newest}: ") == 1
    assert "continuing after step 2 of 4" in again.output
    assert again.losses == run.losses
    assert verify(newest) == []


def full_disk(size, rank):
    """In the child: no file grows beyond ``size``, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


FULL = [("single", 1, True), ("fsdp", 2, True), ("single", 1, False)]


@pytest.mark.parametrize(("config", "processes", "in_background"), matrix(FULL))
def test_a_disk_that_fills_up_in_a_save_ends_the_run_in_words_and_costs_nothing(
    finetune, config, processes, in_background
):
    flags = {"method": "full", "max_steps": 8, "save_steps": 2, "save_total_limit": 1, "config": config}
    flags["async_save"] = in_background
    whole = finetune.ok("whole", processes, **flags)
    finetune("run", processes, prepare=partial(signal_in_step, 6, signal.SIGKILL, None), **flags)
    before = list_checkpoints(finetune.folder / "run/checkpoints")  # two, if the kill came before the older one went
    kept = before[-1]
    shard = max(path.stat().st_size for path in kept.iterdir())
    full = finetune("run", processes, prepare=partial(full_disk, shard * 2 // 3), **flags)
    assert full.status == 2 and "Traceback" not in full.output, full.output
    assert "could not be written" in full.output and "File too large" in full.output
    assert f"the last complete one is {kept.name}" in full.output
    assert full.output.count("error:") == 1
    assert verify(kept) == [] and list_checkpoints(finetune.folder / "run/checkpoints") == before
    assert sorted((finetune.folder / "run/checkpoints").iterdir()) == sorted(before)
    continued = finetune.ok("run", processes, **flags)
    assert f"continuing after step {int(kept.name[5:])} of 8" in continued.output
    assert continued.losses == whole.losses
