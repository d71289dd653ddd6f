"""A checkpoint is whole or refused, gives back every bit, and holds nothing that could be executed."""

import copy
import errno
import json
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import forge, make_model

from kit.checkpoint import load as checkpoint
from kit.checkpoint import save as saver
from kit.checkpoint.load import load_checkpoint
from kit.checkpoint.manifest import (
    describe_file,
    drop_after,
    find_checkpoint,
    list_checkpoints,
    read_manifest,
    read_state,
    verify,
)
from kit.checkpoint.save import Saver
from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.run.log import new_state
from kit.train.optim import build_optimizer

torch.set_num_threads(1)  # for models so small, more of them only wait for each other
ALONE = SimpleNamespace(process_index=0, num_processes=1)  # an Accelerator of one process
ABOUT = {"identity": {"seed": 1}, "strategy": {"type": "single"}, "versions": {}}


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory):
    return {"untied": model_folder, "tied": make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)}


def build(folder, **settings):
    recipe = Recipe(model_name_or_path=str(folder), dataset="x.jsonl", learning_rate=1e-2, **settings)
    model = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))
    return model, build_optimizer(model, recipe)


def save_checkpoint(model, optimizer, folder, state, limit=2, best_step=None, **settings):
    recipe = Recipe(model_name_or_path="m", dataset="d", save_total_limit=limit, **settings)
    one = Saver(ALONE, recipe, folder, ABOUT)
    one.save(model, optimizer, state, best_step)
    one.wait()
    return folder / f"step-{state['step']:08d}"


def train(model, optimizer, steps):
    """Returns the losses, as bits."""
    losses = []
    for step in steps:
        ids = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(step))
        wanted = {"target_positions": torch.arange(8), "targets": ids[0, 1:]}
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), **wanted).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def same(one, other):
    """Bit for bit, through any nesting."""
    if isinstance(one, torch.Tensor):
        # As bytes: 4-bit weights stored as floats may spell a NaN.
        bits = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def saved(folders, tmp_path):
    """Checkpoints of steps 1 to 3, and a function that saves one more."""
    model, optimizer = build(folders["untied"], method="lora", lora_r=2)
    folder = tmp_path / "checkpoints"

    def save(step, limit=0, best_step=None):
        return save_checkpoint(model, optimizer, folder, {"step": step}, limit, best_step)

    train(model, optimizer, [0])
    for step in (1, 2, 3):
        save(step)
    return folder, save


def steps(folder):
    return [path.name for path in list_checkpoints(folder)]


@pytest.mark.parametrize(
    ("tie", "settings"),
    [
        ("untied", {"method": "full"}),
        ("tied", {"method": "full"}),
        ("untied", {"method": "lora"}),
        ("tied", {"method": "lora", "lora_dropout": 0.1}),
        ("untied", {"method": "qlora"}),
        ("untied", {"method": "full", "optim": "adamw_8bit"}),
        ("tied", {"method": "full", "optim": "paged_adamw_8bit"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_weights_and_moments_come_back_bit_for_bit(folders, tmp_path, tie, settings):
    model, optimizer = build(folders[tie], **settings)
    train(model, optimizer, [0, 1])
    path = save_checkpoint(model, optimizer, tmp_path, {"step": 2, "note": {"x": [0.1]}}, 2)
    assert verify(path) == []

    again, other_optimizer = build(folders[tie], **settings)
    assert not same(again.state_dict(), model.state_dict())
    load_checkpoint(again, other_optimizer, path)
    assert same(again.state_dict(), model.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert read_state(path)["step"] == 2 and read_state(path)["note"] == {"x": [0.1]}
    if tie == "tied":
        assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    model.eval(), again.eval()  # dropout draws from one generator
    assert train(again, other_optimizer, [2, 3]) == train(model, optimizer, [2, 3])
    assert same(again.state_dict(), model.state_dict())


def test_only_what_trains_is_stored_and_nothing_that_could_be_unpickled(folders, tmp_path):
    model, optimizer = build(folders["tied"], method="lora", lora_r=2)
    train(model, optimizer, [0])
    path = save_checkpoint(model, optimizer, tmp_path, {"step": 1}, 2)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    for file in path.glob("*.json"):
        json.loads(file.read_text())
    headers = b"".join(file.read_bytes() for file in path.glob("*.safetensors"))
    assert b"lora_A" in headers and b"exp_avg" in headers
    assert b"embed_tokens" not in headers and b"lm_head" not in headers


# Damage


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")


def test_verify_names_every_file_that_is_cut_altered_or_missing(saved):
    folder, save = saved
    for name in files(folder / "step-00000003"):
        for damage, words in [("cut", "bytes, expected"), ("altered", "was altered"), ("missing", "is missing")]:
            shutil.rmtree(folder / "step-00000003")
            path = save(3)
            assert verify(path) == []
            file = path / name
            content = bytearray(file.read_bytes())
            if damage == "missing":
                file.unlink()
            else:
                middle = len(content) // 2
                content[middle] ^= 1
                file.write_bytes(content[:-1] if damage == "cut" else content)
            (fault,) = verify(path)
            assert name in fault and words in fault


MANIFESTS = ["", "{", "[]", "{}", '{"files": []}', '{"files": {}}', '{"files": {"state.json": 3}}', "\x00\x01"]
MANIFESTS += ['{"format": 9, "identity": {}, "files": {"state.json": {"bytes": 1, "xxh3_128": ""}}}']


@pytest.mark.parametrize("text", MANIFESTS)
def test_a_damaged_manifest_is_no_whole_checkpoint(saved, text):
    folder, _ = saved
    (folder / "step-00000003/manifest.json").write_text(text)
    (fault,) = verify(folder / "step-00000003")
    assert "manifest.json" in fault
    assert find_checkpoint(folder, "auto", lambda line: None) == folder / "step-00000002"


@pytest.mark.parametrize("name", ["../outside", "{absolute}", "sub/../../outside", "./state.json", "", "..", "a\0b"])
def test_a_manifest_leads_nowhere_outside_of_its_folder(saved, monkeypatch, name):
    folder, _ = saved
    path, outside = folder / "step-00000003", folder / "outside"
    outside.write_text("somebody's")
    files = json.loads((path / "manifest.json").read_text())["files"]
    forge(path, files=files | {name.format(absolute=outside): describe_file(outside)})
    read = []
    monkeypatch.setattr(checkpoint, "describe_file", lambda file: read.append(file.resolve()) or describe_file(file))
    assert verify(path)
    assert all(file.parent == path for file in read)
    with pytest.raises(UserError, match="resume_from_checkpoint"):
        find_checkpoint(folder, str(path), print)
    assert find_checkpoint(folder, "auto", lambda line: None) == folder / "step-00000002"


def test_weights_that_were_put_beside_those_of_a_checkpoint_are_not_taken(saved):
    folder, _ = saved
    mine = next((folder / "step-00000003").glob("*.safetensors"))
    shutil.copy(mine, mine.with_name("zzz.safetensors"))
    assert verify(mine.parent) == ["zzz.safetensors is not one of its files"]
    assert find_checkpoint(folder, "auto", lambda line: None) == folder / "step-00000002"


@pytest.mark.parametrize("identity", [None, [], "x", 3])
def test_a_manifest_that_does_not_say_whose_it_is_is_damaged(saved, identity):
    folder, _ = saved
    forge(folder / "step-00000003", identity=identity)
    assert "manifest.json is damaged" in verify(folder / "step-00000003")[0]


STATES = [[], "x", {}, {"step": "3"}, {"step": 2.5}, {"step": True}, {"feed": []}, {"evaluated_step": None}]
STATES += [{"first_evaluation": []}, {"last_evaluation": {"eval_loss": "low"}}, {"best": {"eval_loss": None}}]
STATES += [{"recent_losses": ["x"]}, {"recent_losses": 3}, {"tracker_id": 3}, {"optimizer_scalars": []}]
STATES += [{"feed": {"cursors": [["x"]]}}, {"optimizer_scalars": {"x": "y"}}]


@pytest.mark.parametrize("change", STATES, ids=map(str, STATES))
def test_a_state_of_another_form_is_refused_by_name(saved, change):
    folder, _ = saved
    path = folder / "step-00000003"
    state = new_state() | {"optimizer_scalars": {}}
    forge(path, state | change if isinstance(change, dict) and change else change)
    assert verify(path) == []
    with pytest.raises(UserError, match=r"step-00000003/state\.json"):
        read_state(path, new_state())


def test_scalars_of_another_optimiser_are_refused(folders, saved, tmp_path):
    settings = {"method": "full", "optim": "adamw_8bit"}
    model, optimizer = build(folders["untied"], **settings)
    train(model, optimizer, [0])
    path = save_checkpoint(model, optimizer, tmp_path, {"step": 1})
    scalars = read_state(path)["optimizer_scalars"]
    for wrong in ({}, dict.fromkeys(scalars, 1.5), scalars | {"more": 1}):
        forge(path, {"step": 1, "optimizer_scalars": wrong})
        with pytest.raises(UserError, match="optimizer_scalars"):
            load_checkpoint(*build(folders["untied"], **settings), path)


def test_a_folder_without_a_manifest_is_no_checkpoint(saved):
    folder, _ = saved
    (folder / "step-00000003/manifest.json").unlink()
    assert steps(folder) == ["step-00000001", "step-00000002"]
    assert "not a complete checkpoint" in verify(folder / "step-00000003")[0]


def test_auto_takes_the_newest_whole_one_and_says_what_it_skips(saved):
    folder, _ = saved
    said = []
    assert find_checkpoint(folder, "auto", said.append) == folder / "step-00000003" and said == []
    victim = next((folder / "step-00000003").glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert find_checkpoint(folder, "auto", said.append) == folder / "step-00000002"
    assert len(said) == 1 and "skipping" in said[0] and "step-00000003" in said[0] and victim.name in said[0]
    for path in list_checkpoints(folder):
        (path / "state.json").unlink()
    with pytest.raises(UserError, match="no checkpoint of this run is whole"):
        find_checkpoint(folder, "auto", said.append)


def test_going_back_leaves_no_checkpoint_of_the_abandoned_steps(saved):
    folder, _ = saved
    (folder / ".step-00000007.partial").mkdir()
    drop_after(folder, 2)
    assert steps(folder) == ["step-00000001", "step-00000002"] and not list(folder.glob(".*"))


def test_what_a_user_put_beside_the_checkpoints_is_neither_taken_nor_deleted(saved):
    folder, save = saved
    shutil.copytree(folder / "step-00000001", folder / "step-best")
    shutil.copytree(folder / "step-00000001", folder / "step-00000003-good")
    shutil.copytree(folder / "step-00000001", folder / "step-00000007")  # one of theirs under another name
    (folder / "step-latest").symlink_to("step-00000003")
    (folder / "step-00000099").symlink_to("step-00000001")
    (folder / "step-notes.txt").write_text("mine")
    (folder / ".step-mine").mkdir()
    assert steps(folder) == ["step-00000001", "step-00000002", "step-00000003"]
    assert find_checkpoint(folder, "auto", print) == folder / "step-00000003"
    drop_after(folder, 2)
    save(4, limit=1)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".step-mine",
        "step-00000003-good",
        "step-00000004",
        "step-00000007",
        "step-00000099",
        "step-best",
        "step-latest",
        "step-notes.txt",
    ]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_saving_and_loading_an_optimiser_that_has_not_stepped_leaves_it_so(folders, tmp_path, optim):
    """The first steps may all have been skipped."""
    model, optimizer = build(folders["untied"], method="full", optim=optim)
    path = save_checkpoint(model, optimizer, tmp_path, {"step": 1})
    assert not optimizer.state
    again, other_optimizer = build(folders["untied"], method="full", optim=optim)
    load_checkpoint(again, other_optimizer, path)
    assert not other_optimizer.state and same(again.state_dict(), model.state_dict())


def test_without_checkpoints_or_with_none_a_run_starts_anew(saved, tmp_path):
    folder, _ = saved
    assert find_checkpoint(tmp_path / "nothing", "auto", print) is None
    assert find_checkpoint(folder, "none", print) is None


def test_a_checkpoint_asked_for_by_path_must_be_whole(saved):
    folder, _ = saved
    wanted = folder / "step-00000001"
    assert find_checkpoint(folder, str(wanted), print) == wanted
    (wanted / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"resume_from_checkpoint: .*step-00000001: state\.json"):
        find_checkpoint(folder, str(wanted), print)
    with pytest.raises(UserError, match="not a complete checkpoint"):
        find_checkpoint(folder, str(folder / "step-00000009"), print)


# Another model


def test_adapters_of_another_rank_are_refused_with_both_shapes(folders, saved):
    folder, _ = saved
    model, optimizer = build(folders["untied"], method="lora", lora_r=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=r"lora_A.* has shape \[2, 32\]; expected \[3, 32\]"):
        load_checkpoint(model, optimizer, folder / "step-00000003")
    assert same(model.state_dict(), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "full"}, "no tensor model.model"),
        ({"method": "lora", "lora_r": 2, "lora_target_modules": "q_proj"}, "has no place in this model"),
        ({"method": "lora", "lora_r": 2, "optim": "adamw_8bit"}, "another model, method or optimiser"),
    ],
)
def test_a_checkpoint_of_another_method_or_optimiser_is_refused(folders, saved, settings, message):
    folder, _ = saved
    with pytest.raises(UserError, match=message):
        load_checkpoint(*build(folders["untied"], **settings), folder / "step-00000003")


# Keeping and pruning


def test_the_newest_ones_are_kept(saved):
    folder, save = saved
    save(4, limit=2)
    assert steps(folder) == ["step-00000003", "step-00000004"]
    save(5, limit=1)
    assert steps(folder) == ["step-00000005"]
    for step in (6, 7, 8):
        save(step, limit=0)
    assert steps(folder) == [f"step-0000000{step}" for step in (5, 6, 7, 8)]


def test_the_best_one_is_kept_besides_the_newest_ones(saved):
    folder, save = saved
    for step in (4, 5, 6):
        save(step, limit=2, best_step=2)
    assert steps(folder) == ["step-00000002", "step-00000005", "step-00000006"]
    save(7, limit=2, best_step=7)
    assert steps(folder) == ["step-00000006", "step-00000007"]


@pytest.mark.parametrize("moment", ["tensors", "hash", "manifest", "rename"])
def test_until_a_new_one_is_complete_the_old_ones_stay(saved, monkeypatch, moment):
    """What goes wrong while saving costs nothing but the save, and says what is still there."""
    folder, save = saved
    where, name = {
        "tensors": (saver.HuggingFaceStorageWriter, "write_data"),
        "hash": (saver, "describe_file"),
        "manifest": (saver.durable, "write_text"),
        "rename": (saver.os, "replace"),
    }[moment]

    def crash(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(where, name, crash)
        with pytest.raises(UserError, match=r"step 4 could not be .*No space left.*last whole one is step-00000003"):
            save(4, limit=1)
    assert steps(folder) == ["step-00000001", "step-00000002", "step-00000003"]
    assert find_checkpoint(folder, "auto", print) == folder / "step-00000003"
    drop_after(folder, 3)  # as the next start does
    save(4, limit=1)
    assert steps(folder) == ["step-00000004"] and verify(folder / "step-00000004") == []
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]


def test_a_checkpoint_holds_the_moment_of_its_save_while_training_goes_on(folders, tmp_path, monkeypatch):
    """The save is held up until the weights have changed under it."""
    model, optimizer = build(folders["untied"], method="full")
    train(model, optimizer, [0])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    go_on = threading.Event()
    write = saver.HuggingFaceStorageWriter.write_data
    monkeypatch.setattr(saver.HuggingFaceStorageWriter, "write_data", lambda *args: go_on.wait(60) and write(*args))
    one = Saver(ALONE, Recipe(model_name_or_path="m", dataset="d"), tmp_path, ABOUT)
    one.save(model, optimizer, {"step": 1})
    train(model, optimizer, [1])
    assert not list_checkpoints(tmp_path) and not one.has_failed
    go_on.set()
    one.wait()
    load_checkpoint(model, optimizer, tmp_path / "step-00000001")
    assert same((model.state_dict(), optimizer.state_dict()), before)


def test_one_save_at_a_time_and_a_failed_one_is_told_at_the_next(folders, tmp_path, monkeypatch):
    model, optimizer = build(folders["untied"], method="lora", lora_r=2)
    train(model, optimizer, [0])
    running, most = [0], [0]
    write = saver.HuggingFaceStorageWriter.write_data

    def slowly(*args):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.2)
        running[0] -= 1
        return write(*args)

    monkeypatch.setattr(saver.HuggingFaceStorageWriter, "write_data", slowly)
    one = Saver(ALONE, Recipe(model_name_or_path="m", dataset="d", save_total_limit=0), tmp_path, ABOUT)
    for step in (1, 2, 3):
        one.save(model, optimizer, {"step": step})
    one.wait()
    assert most == [1] and len(list_checkpoints(tmp_path)) == 3

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(saver, "describe_file", refuse)
    one.save(model, optimizer, {"step": 4})
    end = time.monotonic() + 60
    while not one.has_failed:
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(UserError, match=r"step 4 could not be written .*Permission denied"):
        one.save(model, optimizer, {"step": 5})
    one.wait()  # told once


def test_without_async_save_a_checkpoint_is_complete_when_save_returns(folders, tmp_path):
    model, optimizer = build(folders["untied"], method="lora", lora_r=2)
    train(model, optimizer, [0])
    one = Saver(ALONE, Recipe(model_name_or_path="m", dataset="d", async_save=False), tmp_path, ABOUT)
    one.save(model, optimizer, {"step": 1})
    assert steps(tmp_path) == ["step-00000001"]


def test_ranks_without_a_common_disk_are_told_at_the_first_save(saved, monkeypatch):
    folder, save = saved
    monkeypatch.setattr(Saver, "_on_all", lambda self, work: [work(), (["shard-of-another-machine.safetensors"], {})])
    with pytest.raises(UserError, match="output_dir must be on a disk that all machines share"):
        save(4)
    assert steps(folder) == ["step-00000001", "step-00000002", "step-00000003"]


def test_the_manifest_says_whose_checkpoint_it_is(saved):
    folder, _ = saved
    manifest = json.loads((folder / "step-00000002/manifest.json").read_text())
    assert {key: manifest[key] for key in ABOUT} == ABOUT and manifest["step"] == 2
    assert read_manifest(folder / "step-00000002")["identity"] == {"seed": 1}


def test_a_checkpoint_can_be_moved(saved, folders, tmp_path):
    folder, _ = saved
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder / "step-00000003", moved)
    assert verify(moved) == []
    load_checkpoint(*build(folders["untied"], method="lora", lora_r=2), moved)
