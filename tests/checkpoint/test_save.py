"""A save is complete or absent, whenever it fails, and does not change the run."""

import copy
import errno
import json
import threading
import time

import pytest
from checkpoint_helpers import build, same, save_checkpoint, saver_of, steps, train

from kit.checkpoint import save as saver
from kit.checkpoint.load import load_checkpoint, load_weights
from kit.checkpoint.manifest import find_checkpoint, list_checkpoints, read_manifest, verify
from kit.checkpoint.save import Saver
from kit.system.errors import UserError


@pytest.mark.slow
def test_only_trainable_tensors_are_stored_and_no_pickles(folders, tmp_path):
    model, optimizer = build(folders["tied"], method="lora", lora_r=2)
    train(model, optimizer, [0])
    path = save_checkpoint(model, optimizer, tmp_path, {"step": 1}, 2)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    for file in path.glob("*.json"):
        json.loads(file.read_text())
    headers = b"".join(file.read_bytes() for file in path.glob("*.safetensors"))
    assert b"lora_A" in headers and b"exp_avg" in headers
    assert b"embed_tokens" not in headers and b"lm_head" not in headers


@pytest.mark.slow
def test_weights_only_are_a_third_of_the_size_and_can_be_loaded(folders, tmp_path):
    model, optimizer = build(folders["untied"], method="full")
    train(model, optimizer, [0])
    one, sizes = saver_of(tmp_path, async_save=False), []
    for step, weights_only in ((1, False), (2, True)):
        one.save(model, optimizer, {"step": step}, weights_only)
        folder = tmp_path / f"step-{step:08d}"
        assert verify(folder) == [] and read_manifest(folder)["weights_only"] == weights_only
        sizes.append(sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    assert sizes[1] < 0.4 * sizes[0]
    again, _ = build(folders["untied"], method="full")
    train(again, _, [1])
    load_weights(again, tmp_path / "step-00000002")
    assert same(again.state_dict(), model.state_dict())


# Keeping and pruning


@pytest.mark.slow
def test_the_newest_ones_are_kept_and_the_best_one(saved):
    folder, save = saved
    for step in (4, 5, 6):
        save(step, limit=2, best_step=2)
    assert steps(folder) == ["step-00000002", "step-00000005", "step-00000006"]
    save(7, limit=1, best_step=7)
    assert steps(folder) == ["step-00000007"]
    for step in (8, 9):
        save(step, limit=0)
    assert steps(folder) == [f"step-0000000{step}" for step in (7, 8, 9)]


# Failures, and saves in the background


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["tensors", "rename"])
def test_until_a_new_one_is_complete_the_old_ones_stay(saved, monkeypatch, moment):
    """What goes wrong while saving costs nothing but the save, and says what is still there."""
    folder, save = saved
    where, name = {
        "tensors": (saver.TensorWriter, "write_data"),
        "rename": (saver.os, "replace"),
    }[moment]

    def crash(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(where, name, crash)
        with pytest.raises(UserError, match=r"step 4 could not be .*No space left.*last complete one is step-00000003"):
            save(4, limit=1)
    assert steps(folder) == ["step-00000001", "step-00000002", "step-00000003"]
    assert find_checkpoint(folder, "auto", print) == folder / "step-00000003"
    assert not list(folder.glob(".*"))  # on a full disk, what was begun would take the room that is needed
    save(4, limit=1)
    assert steps(folder) == ["step-00000004"] and verify(folder / "step-00000004") == []
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]


@pytest.mark.slow
def test_a_checkpoint_holds_the_moment_of_its_save_while_training_continues(folders, tmp_path, monkeypatch):
    """The save is held up until the weights have changed under it."""
    model, optimizer = build(folders["untied"], method="full")
    train(model, optimizer, [0])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    go_on = threading.Event()
    write = saver.TensorWriter.write_data
    monkeypatch.setattr(saver.TensorWriter, "write_data", lambda *args: go_on.wait(60) and write(*args))
    one = saver_of(tmp_path)
    one.save(model, optimizer, {"step": 1})
    train(model, optimizer, [1])
    assert not list_checkpoints(tmp_path) and not one.has_failed
    go_on.set()
    one.wait()
    load_checkpoint(model, optimizer, tmp_path / "step-00000001")
    assert same((model.state_dict(), optimizer.state_dict()), before)


@pytest.mark.slow
def test_a_save_that_failed_in_the_background_is_reported_once_at_the_next(folders, tmp_path, monkeypatch):
    model, optimizer = build(folders["untied"], method="lora", lora_r=2)
    train(model, optimizer, [0])

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(saver, "describe_file", refuse)
    one = saver_of(tmp_path)
    one.save(model, optimizer, {"step": 4})
    end = time.monotonic() + 60
    while not one.has_failed:
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(UserError, match=r"step 4 could not be written .*Permission denied"):
        one.save(model, optimizer, {"step": 5})
    one.wait()


def test_ranks_without_a_common_disk_are_reported_at_the_first_save(saved, monkeypatch):
    folder, save = saved
    publish = Saver._publish
    monkeypatch.setattr(Saver, "_publish", lambda self, files, *more: publish(self, files | {"of rank 1": {}}, *more))
    with pytest.raises(UserError, match="output_dir must be on a disk that all machines share"):
        save(4)
    assert steps(folder) == ["step-00000001", "step-00000002", "step-00000003"]
