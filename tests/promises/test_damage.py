"""Disks that lie or fill up, folders in use, data sets of hardly any size: through the real script."""

import os
import resource
import shutil
import signal
from functools import partial

import pytest
from helpers import forge, matrix

from kit.checkpoint.manifest import list_checkpoints, read_state, verify

pytestmark = pytest.mark.slow

FLAGS = {"method": "lora", "lora_dropout": 0.1, "max_steps": 4, "save_steps": 2}


@pytest.fixture(scope="module")
def halfway(tmp_path_factory, model_folder, chat_file):
    """A run as it was after two of four steps' checkpoints, its flags, and the losses it should have."""
    from helpers import Finetune

    finetune = Finetune(model_folder, chat_file, tmp_path_factory.mktemp("halfway"))
    whole = finetune.ok("whole", **FLAGS)
    record = whole.folder / "run.json"
    record.write_text(record.read_text().replace('"finished_steps": 4', '"finished_steps": 0'))
    shutil.rmtree(whole.folder / "final")
    return whole


@pytest.mark.long
@pytest.mark.parametrize(("damage", "processes"), [("flip", 2), ("cut", 1), ("gone", 1)])
def test_a_bit_flipped_or_a_file_cut_short_costs_that_checkpoint_only(finetune, halfway, damage, processes):
    """Two ranks share the hashing, and both go back. Each file of a checkpoint: tests/checkpoint/test_manifest.py."""
    run = shutil.copytree(halfway.folder, finetune.folder / "run")
    newest = run / "checkpoints/step-00000004"
    file = {"flip": next(newest.glob("*.safetensors")), "cut": newest / "state.json", "gone": newest / "manifest.json"}
    content = bytearray(file[damage].read_bytes())
    content[len(content) // 2] ^= 4
    file[damage].unlink()
    if damage != "gone":
        file[damage].write_bytes(content[: len(content) // 3] if damage == "cut" else content)
    again = finetune.ok("run", processes, **FLAGS, **({"config": "ddp"} if processes > 1 else {}))
    assert again.output.count(f"skipping {newest}: ") == 1
    assert "continuing after step 2 of 4" in again.output
    assert again.losses == halfway.losses or processes > 1
    assert verify(newest) == []


def test_a_forged_checkpoint_ends_in_words_and_nothing_is_touched(finetune, halfway):
    for number, change in enumerate([{"step": "4"}, {"recent_losses": ["x"]}, {"best": None}]):
        folder = finetune.folder / f"run{number}"
        shutil.copytree(halfway.folder, folder)
        newest = list_checkpoints(folder / "checkpoints")[-1]
        forge(newest, read_state(newest) | change)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        run = finetune(folder.name, **FLAGS)
        assert run.status == 2 and "Traceback" not in run.output, run.output
        assert f"error: {newest}/state.json: {next(iter(change))} is " in run.output
        (folder / "error.txt").unlink()  # which repeats the message
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def full_disk(size, rank):
    """In the child: no file grows beyond ``size``, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


FULL = [("single", 1, True), ("fsdp", 2, True), ("single", 1, False)]


@pytest.mark.parametrize(("config", "processes", "in_background"), matrix(FULL))
def test_a_disk_that_fills_up_in_a_save_ends_the_run_in_words_and_costs_nothing(
    finetune, config, processes, in_background
):
    flags = {"method": "full", "max_steps": 14, "save_steps": 2, "save_total_limit": 1, "config": config}
    flags["async_save"] = in_background
    whole = finetune.ok("whole", processes, **flags)
    finetune("run", processes, until_step(finetune.folder / "run", 5), **flags)
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
    assert f"continuing after step {int(kept.name[5:])} of 14" in continued.output
    assert continued.losses == whole.losses


def until_step(folder, step):
    """Kills all ranks when ``step`` steps are done."""

    def meanwhile(children):
        path = folder / "metrics.jsonl"
        if not path.exists() or path.read_text().count('"loss"') < step:
            return False
        for child in children:
            child.kill()
        return True

    return meanwhile


def test_a_second_start_in_the_same_folder_is_locked_out_and_the_first_goes_on(finetune):
    flags = FLAGS | {"max_steps": 400, "save_steps": 50}
    seen = []

    def second(children):
        path = finetune.folder / "run/metrics.jsonl"
        if not path.exists() or path.read_text().count('"loss"') < 3:
            return False
        seen.append(finetune("again", **flags, output_dir=finetune.folder / "run"))
        seen.append(finetune("over", **flags, output_dir=finetune.folder / "run", overwrite_output_dir="true"))
        os.kill(children[0].pid, signal.SIGTERM)
        return True

    first = finetune("run", 1, second, **flags)
    for run in seen:
        assert run.status == 2, run.output
        assert "in use by process" in run.output and "-2; or wait for it, or end it" in run.output
    assert len(seen) == 2 and first.status == 75, first.output
    assert [row["step"] for row in first.rows] == list(range(1, first.info["interrupted"] + 1))
