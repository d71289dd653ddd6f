"""The owner of an output folder: a run resumes in its own, and changes nothing of another."""

import json
import shutil
from types import SimpleNamespace

import pytest
from helpers import actual_strategy, forge

from kit.run.folder import RunFolder
from kit.run.identity import identity
from kit.system.errors import UserError

DATA = {"fingerprint": "abc"}
STRATEGY = actual_strategy()
ALONE = SimpleNamespace(num_processes=1)  # an accelerator


def look(recipe, data="abc", model="base"):
    return RunFolder(recipe, "mine", identity(recipe, data, model))


def begin(recipe):
    """As far as the lock, and what ``overwrite_output_dir`` deletes."""
    folder = look(recipe)
    folder.open()
    folder.resume(ALONE)


def write(recipe, finished_steps=0):
    """The record of a run, and that it finished."""
    folder = look(recipe)
    folder.begin(STRATEGY, DATA, folder.loop_state().step, 8)
    if finished_steps:
        folder.end(finished_steps, stopped=False)


@pytest.fixture
def started(recipe, tmp_path, checkpoint_of):
    """A folder in which a run was started, with a checkpoint."""
    begin(recipe())
    folder = tmp_path / "out"
    write(recipe())
    checkpoint_of(recipe(), folder / "checkpoints", 1)
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def refusal(recipe, *fingerprints):
    with pytest.raises(UserError) as caught:
        look(recipe, *fingerprints)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].where == "output_dir"
    return str(caught.value)


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_another_run_is_refused_with_every_setting_that_differs(recipe, started):
    text = refusal(recipe(learning_rate=0.5, lora_r=3, seed=7), "other")
    for line in (
        "learning_rate: 0.0002 -> 0.5",
        "lora_r: 16 -> 3",
        "seed: 42 -> 7",
        "the samples of dataset changed, or this version of the kit reads them differently",
    ):
        assert line in text
    assert "max_steps" not in text and "weight_decay" not in text
    assert "--output_dir" in text and "--overwrite_output_dir" in text


def test_a_run_is_overwritten_only_if_asked_to(recipe, started):
    assert "holds this run already" in refusal(recipe(resume_from_checkpoint="none"))
    look(recipe(resume_from_checkpoint="none", overwrite_output_dir=True))


def test_overwriting_deletes_the_earlier_run(recipe, started):
    mine = recipe(overwrite_output_dir=True, seed=7)
    look(mine, "other")
    assert (started / "run.json").exists()
    (started / "notes.txt").write_text("the user's own")
    begin(mine)
    assert sorted(path.name for path in started.iterdir()) == [".lock", "notes.txt", "run.json"]
    # Killed now, it is still known whose the folder is.
    assert look(mine).finished_steps == 0


def test_overwriting_goes_through_a_link_but_not_out_of_the_folder(recipe, started, tmp_path):
    link, outside = tmp_path / "link", tmp_path / "outside"
    link.symlink_to(started)
    outside.mkdir()
    (outside / "thesis.txt").touch()
    shutil.rmtree(started / "checkpoints")
    (started / "checkpoints").symlink_to(outside)
    mine = recipe(overwrite_output_dir=True, output_dir=str(link))
    look(mine)
    begin(mine)
    assert link.is_symlink() and sorted(path.name for path in started.iterdir()) == [".lock", "run.json"]
    assert (outside / "thesis.txt").exists()


def test_a_file_in_the_way_is_named(recipe, tmp_path, started):
    (started / "final").touch()
    assert f"{started}/final is not a folder; expected a folder" in refusal(recipe())
    shutil.rmtree(started)
    (tmp_path / "out").touch()
    assert "out is a file" in refusal(recipe())
    assert "out is a file" in refusal(recipe(output_dir=str(tmp_path / "out/deeper/still")))
    assert "out is a file" in refusal(recipe(overwrite_output_dir=True))


def test_a_run_does_not_continue_from_weights_only(recipe, started):
    """It is refused with what to do, unless the run is finished: then nothing is asked of the checkpoint."""
    forge(started / "checkpoints/step-00000001", weights_only=True)
    with pytest.raises(UserError) as caught:
        look(recipe()).is_finished(1, 8)
    (problem,) = caught.value.problems
    assert problem.where == "resume_from_checkpoint" and "holds weights only (save_only_model)" in problem.found
    assert "recipes/export.py" in problem.fix and "--overwrite_output_dir" in problem.fix
    write(recipe(), finished_steps=1)
    (started / "final").mkdir()
    assert look(recipe()).is_finished(1, 1)


def test_resuming_reports_changes_of_rounding_and_deletes_later_checkpoints(recipe, started, checkpoint_of, capsys):
    checkpoint_of(recipe(), started / "checkpoints", 5)
    folder = look(recipe(resume_from_checkpoint=str(started / "checkpoints/step-00000001")))
    folder.begin(STRATEGY, DATA, folder.loop_state().step, 8)
    out = capsys.readouterr().out
    assert f"continuing after step 1 of 8 ({started}/checkpoints/step-00000001)\nnote: changed since" in out
    starts = json.loads((started / "run.json").read_text())["starts"]
    assert [each["step"] for each in starts] == [0, 1]
    assert "num_processes: 1 -> 2" in out
    assert [path.name for path in (started / "checkpoints").iterdir()] == ["step-00000001"]
    assert sorted(folder.about) == ["identity", "own_code", "rounding", "strategy", "total_steps", "versions"]


# One run at a time


def test_a_run_that_was_at_work_between_the_check_and_the_lock_is_not_overwritten(recipe, tmp_path):
    folder = tmp_path / "out"
    late = look(recipe(seed=7))
    begin(recipe(seed=1))
    write(recipe(seed=1), finished_steps=6)
    before = content(folder)
    with pytest.raises(UserError, match=r"another run used .* while this one started"):
        late.open()
    assert content(folder) == before


def test_a_checkpoint_path_is_used_once(recipe, tmp_path, checkpoint_of):
    """The same command after a kill goes on from what came after it."""
    wanted, elsewhere = (checkpoint_of(recipe(), tmp_path / name, 2) for name in ("other", "elsewhere"))
    mine = recipe(resume_from_checkpoint=str(wanted))
    assert look(mine).checkpoint == wanted
    begin(mine)
    write(mine)
    assert look(mine).checkpoint == wanted  # killed before it had saved anything
    newest = checkpoint_of(mine, tmp_path / "out/checkpoints", 3)
    assert look(mine).checkpoint == newest
    assert look(recipe(resume_from_checkpoint=str(elsewhere))).checkpoint == elsewhere
    assert look(recipe(overwrite_output_dir=True)).checkpoint is None
    assert look(recipe()).checkpoint == newest


def test_leftovers_of_killed_starts_are_deleted_when_the_run_resumes(recipe, started):
    (started / ".final.partial").mkdir()
    (started / ".final.partial/model.safetensors").touch()
    (started / "checkpoints/.step-00000002.partial").mkdir()
    for name in (
        ".run.json.partial",
        ".run.json.0123abcd.partial",
        ".metrics.jsonl.0123abcd.partial",
        ".error.txt.1.partial",
    ):
        (started / name).touch()
    (started / ".notes.partial").touch()  # the user's
    begin(recipe())
    write(recipe())
    assert {path.name for path in started.rglob(".*")} == {".lock", ".notes.partial"}


def test_a_folder_that_holds_no_run_is_never_deleted(recipe, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    # Files that another program may have called run.json, or a disk has damaged.
    for record in (None, "", "[]", "[" * 100_000, '{"identity": {}, "finished_steps": Infinity}', '{"identity": 3}'):
        if record is not None:
            (folder / "run.json").write_text(record)
        before = content(folder)
        for overwrite in (False, True):
            text = refusal(recipe(overwrite_output_dir=overwrite))
            assert "no record of a run" in text if record is not None else "holds no run" in text
            assert "--overwrite_output_dir" not in text  # it would not help
        assert content(folder) == before


def test_a_run_does_not_overwrite_its_inputs(recipe, started):
    inside = started / "inside"
    inside.mkdir()
    for key in ("dataset", "model_name_or_path", "resume_from_checkpoint"):
        with pytest.raises(UserError, match=f"{key}: .*is in the output_dir"):
            look(recipe(**{key: str(inside)}, overwrite_output_dir=True))


def test_a_dry_run_says_after_which_step_the_run_would_continue(recipe, started):
    path = started / "checkpoints/step-00000001"
    assert look(recipe()).describe_resume(8) == [f"would continue after step 1 of 8 ({path})"]
