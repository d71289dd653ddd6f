"""A checkpoint is complete, or refused by name; only a run's own files are part of it."""

import json
import shutil

import pytest
from checkpoint_helpers import steps
from helpers import forge

from kit.checkpoint import manifest
from kit.checkpoint.manifest import describe_file, drop_after, find_checkpoint, list_checkpoints, read_state, verify
from kit.system.errors import UserError
from kit.train.loop_state import LoopState

# Damage


def test_verify_names_a_file_that_is_cut_altered_or_missing(saved):
    folder, _ = saved
    path = folder / "step-00000003"
    assert verify(path) == []
    for file in [next(path.glob("*.safetensors")), path / "state.json"]:
        content = file.read_bytes()
        altered = content[:-1] + bytes([content[-1] ^ 1])
        for damaged, words in [(content[:-1], "bytes, expected"), (altered, "was altered"), (None, "is missing")]:
            file.unlink() if damaged is None else file.write_bytes(damaged)
            (fault,) = verify(path)
            assert file.name in fault and words in fault
        file.write_bytes(content)


@pytest.mark.parametrize("name", ["../outside", "{absolute}", "a\0b"])
def test_a_manifest_leads_nowhere_outside_of_its_folder(saved, monkeypatch, name):
    folder, _ = saved
    path, outside = folder / "step-00000003", folder / "outside"
    outside.write_text("somebody's")
    files = json.loads((path / "manifest.json").read_text())["files"]
    forge(path, files=files | {name.format(absolute=outside): describe_file(outside)})
    read = []
    monkeypatch.setattr(manifest, "describe_file", lambda file: read.append(file.resolve()) or describe_file(file))
    assert verify(path)
    assert all(file.parent == path for file in read)
    with pytest.raises(UserError, match="resume_from_checkpoint"):
        find_checkpoint(folder, str(path), print)
    assert find_checkpoint(folder, "auto", lambda line: None) == folder / "step-00000002"


def test_foreign_weights_in_a_checkpoint_are_not_read(saved):
    folder, _ = saved
    mine = next((folder / "step-00000003").glob("*.safetensors"))
    shutil.copy(mine, mine.with_name("zzz.safetensors"))
    assert verify(mine.parent) == ["zzz.safetensors is not one of its files"]
    assert find_checkpoint(folder, "auto", lambda line: None) == folder / "step-00000002"


def test_a_damaged_manifest_is_no_whole_checkpoint(saved):
    folder, _ = saved
    path = folder / "step-00000003"
    whole = (path / "manifest.json").read_text()
    for text in (
        "",
        "[]",
        '{"files": {"state.json": 3}}',
        whole.replace('"format": 1', '"format": 9'),
    ):
        (path / "manifest.json").write_text(text)
        (fault,) = verify(path)
        assert "manifest.json" in fault
        assert find_checkpoint(folder, "auto", lambda line: None) == folder / "step-00000002"
    (path / "manifest.json").write_text(whole)
    (path / "manifest.json").unlink()
    assert "not a complete checkpoint" in verify(path)[0]


def test_a_state_of_another_form_is_refused_by_name(saved):
    folder, _ = saved
    path = folder / "step-00000003"
    state = LoopState().record() | {"optimizer_scalars": {}}
    for change in ({"step": True}, {"feed": []}):
        forge(path, state | change)
        assert verify(path) == []
        with pytest.raises(UserError, match=r"step-00000003/state\.json"):
            read_state(path, LoopState().record())
    forge(path, [])
    with pytest.raises(UserError, match=r"step-00000003/state\.json"):
        read_state(path, LoopState().record())


# Which one to continue from


def test_auto_takes_the_newest_complete_one_and_reports_skipped_ones(saved):
    folder, _ = saved
    said = []
    assert find_checkpoint(folder, "auto", said.append) == folder / "step-00000003" and said == []
    victim = next((folder / "step-00000003").glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert find_checkpoint(folder, "auto", said.append) == folder / "step-00000002"
    assert len(said) == 1 and "skipping" in said[0] and "step-00000003" in said[0] and victim.name in said[0]
    for path in list_checkpoints(folder):
        (path / "state.json").unlink()
    with pytest.raises(UserError, match="no checkpoint of this run is complete"):
        find_checkpoint(folder, "auto", said.append)


def test_a_checkpoint_asked_for_by_path_must_be_whole(saved):
    folder, _ = saved
    wanted = folder / "step-00000001"
    assert find_checkpoint(folder, str(wanted), print) == wanted
    (wanted / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"resume_from_checkpoint: .*step-00000001: state\.json"):
        find_checkpoint(folder, str(wanted), print)
    with pytest.raises(UserError, match="not a complete checkpoint"):
        find_checkpoint(folder, str(folder / "step-00000009"), print)


@pytest.mark.parametrize("name", [".step-00000004.partial", ".step-00000002.deleted"])
def test_a_link_with_the_name_of_a_leftover_is_deleted_but_not_its_target(saved, name, tmp_path):
    folder, _ = saved
    (folder / ".step-00000007.partial").mkdir()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "sub").mkdir(parents=True)
    (elsewhere / "sub/file").write_text("precious")
    (folder / name).symlink_to(elsewhere)
    drop_after(folder, 2)
    assert steps(folder) == ["step-00000001", "step-00000002"] and not list(folder.glob(".*"))
    (folder / name).symlink_to(elsewhere)
    manifest.delete(folder / "step-00000002")
    assert (elsewhere / "sub/file").read_text() == "precious" and steps(folder) == ["step-00000001"]


def test_files_of_a_user_next_to_checkpoints_are_neither_read_nor_deleted(saved):
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
