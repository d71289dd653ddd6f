"""Whose output folder it is: a run goes on in its own, and nothing of anybody else is touched."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, actual_strategy, forge

from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.run.folder import RunFolder
from kit.run.identity import identity

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


def test_an_error_of_the_start_before_neither_refuses_the_next_one_nor_outlives_it(recipe, tmp_path):
    begin(recipe())
    (tmp_path / "out/error.txt").write_text("error: out of memory")
    begin(recipe())
    assert (tmp_path / "out/error.txt").exists()  # it has not come further than the one before
    write(recipe())
    assert not (tmp_path / "out/error.txt").exists()


def refusal(recipe, *fingerprints):
    with pytest.raises(UserError) as caught:
        look(recipe, *fingerprints)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].where == "output_dir"
    return str(caught.value)


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.mark.parametrize("path", ["new", "new/in/new", "empty"])
def test_a_new_or_empty_folder_is_taken(recipe, tmp_path, path):
    (tmp_path / "empty").mkdir()
    mine = recipe(output_dir=str(tmp_path / path))
    look(mine)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "empty"]  # to check is not to make
    begin(mine)
    assert (tmp_path / path).is_dir()


def test_links_in_a_circle_are_refused(recipe, tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    assert "expected a folder to write to" in refusal(recipe(output_dir=str(tmp_path / "one")))
    assert "expected a folder to write to" in refusal(recipe(output_dir=str(tmp_path / "one/run")))


def test_the_same_command_again_goes_on(recipe, started):
    before = content(started)
    look(recipe())
    begin(recipe())
    assert content(started) == before


def test_what_does_not_change_a_step_may_change(recipe, started):
    changes = {"max_steps": 9, "per_device_train_batch_size": 2, "save_steps": 5, "logging_steps": 3, "eval_steps": 2}
    look(recipe(**changes, eval_dataset="e.jsonl", report_to="tensorboard"))


def test_another_run_is_refused_with_every_setting_that_differs(recipe, started):
    text = refusal(recipe(learning_rate=0.5, lora_r=3, seed=7), "other")
    for line in (
        "learning_rate: 0.0002 -> 0.5",
        "lora_r: 16 -> 3",
        "seed: 42 -> 7",
        "the samples that dataset gives are others, or this version of the kit reads them otherwise",
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


def test_nothing_is_deleted_before_the_checkpoint_to_begin_from_is_known_to_be_whole(recipe, started):
    before = {path.name for path in started.iterdir()}
    assert {"checkpoints", "metrics.jsonl"} < before
    look(recipe(overwrite_output_dir=True)).open()
    assert {path.name for path in started.iterdir()} == before


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


# Files that another program may have called run.json, or a disk has damaged.
RECORDS = ["", "{", "[]", "3", "{}", '{"identity": 3}', '{"identity": "text"}', '{"name": "another program"}', "\x00"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("record", [None, *RECORDS])
def test_a_folder_that_holds_no_run_is_never_deleted(recipe, tmp_path, overwrite, record):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    if record is not None:
        (folder / "run.json").write_text(record)
    before = content(folder)
    text = refusal(recipe(overwrite_output_dir=overwrite))
    assert "no record of a run" in text if record is not None else "holds no run" in text
    assert "out-2; or empty it yourself" in text
    assert "--overwrite_output_dir" not in text  # it would not help
    assert content(folder) == before


def test_a_file_in_the_way_is_named(recipe, tmp_path):
    (tmp_path / "out").touch()
    assert "out is a file" in refusal(recipe())
    assert "out is a file" in refusal(recipe(output_dir=str(tmp_path / "out/deeper/still")))
    assert "out is a file" in refusal(recipe(overwrite_output_dir=True))


AS_NOBODY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.run.folder import RunFolder
if os.geteuid() == 0:  # to root everything is writable
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for folder in sys.argv[2:]:
    try:
        RunFolder(Recipe(model_name_or_path="m", dataset="d", output_dir=folder), "mine", {})
        print("fine")
    except UserError as error:
        print(str(error).splitlines()[0])
"""


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_refused():
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders keep others out
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "locked/inner").mkdir(parents=True)
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        (folder / "locked/inner").chmod(0o555)
        (folder / "locked").chmod(0o555)
        outputs = [str(folder / name) for name in ("locked", "locked/new", "locked/inner", "open/new")]
        words = [sys.executable, "-c", AS_NOBODY, str(ROOT), *outputs]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd="/")
        (folder / "locked").chmod(0o755)
    assert result.stdout.splitlines() == [
        f"error: output_dir: {folder}/locked cannot be written to",
        f"error: output_dir: {folder}/locked cannot be written to",
        f"error: output_dir: {folder}/locked/inner cannot be written to",
        "fine",
    ], result.stderr


def test_the_record_says_what_ran(recipe, started):
    record = json.loads((started / "run.json").read_text())
    assert record["recipe_name"] == "mine"
    assert Recipe(**record["recipe"]) == recipe()
    assert record["strategy"] == STRATEGY.record() and record["identity"] == identity(recipe(), "abc", "base")
    assert record["data"] == DATA
    assert record["versions"]["torch"] and record["versions"]["kit"]
    assert [(each["step"], each["changed"]) for each in record["starts"]] == [(0, [])]
    assert (record["finished_steps"], record["interrupted"]) == (0, None)
    assert sorted(path.name for path in started.iterdir()) == [".lock", "checkpoints", "metrics.jsonl", "run.json"]


@pytest.mark.parametrize("key", ["dataset", "eval_dataset", "model_name_or_path", "resume_from_checkpoint"])
def test_what_a_run_reads_is_not_overwritten_by_it(recipe, started, key):
    inside = started / "inside"
    inside.mkdir()
    with pytest.raises(UserError, match=f"{key}: .*lies in the output_dir"):
        look(recipe(**{key: str(inside)}, overwrite_output_dir=True))


def test_a_finished_run_is_known_by_the_steps_its_final_model_has(recipe, started, capsys):
    assert look(recipe()).finished_steps == 0
    write(recipe(), finished_steps=6)
    folder = look(recipe())
    assert folder.finished_steps == 6
    assert not folder.is_finished(6, 8)
    with pytest.raises(UserError, match="no checkpoint to go on from"):
        folder.is_finished(0, 8)
    with pytest.raises(UserError, match="4 steps wanted, and 6 are done"):
        folder.is_finished(6, 4)
    capsys.readouterr()
    assert not folder.is_finished(6, 6)  # the final model was deleted
    assert capsys.readouterr().out == ""
    (started / "final").mkdir()
    assert folder.is_finished(6, 6)
    assert f"this run is finished: {started}/final\nto go on, raise max_steps" in capsys.readouterr().out
    again = look(recipe(resume_from_checkpoint=str(started / "checkpoints/step-00000001")))
    assert not again.is_finished(1, 6)


def test_a_run_that_ended_early_is_finished_for_the_metric_that_it_followed(recipe, started):
    write(recipe(early_stopping_patience=2), finished_steps=6)
    record = json.loads((started / "run.json").read_text()) | {"ended_early": "eval_loss did not fall"}
    (started / "final").mkdir()
    followed = record["recipe"].pop("metric_for_best_model")
    assert followed == "eval_loss"
    for metric in ({}, {"metric_for_best_model": followed}):  # of an earlier version, which had no other
        (started / "run.json").write_text(json.dumps(record | {"recipe": record["recipe"] | metric}))
        assert look(recipe(early_stopping_patience=2)).is_finished(6, 8)
        other = recipe(early_stopping_patience=2, metric_for_best_model="eval_rewards/margins")
        assert not look(other).is_finished(6, 8)


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


def test_a_stop_by_a_signal_is_noted_and_the_next_start_takes_the_note_away(recipe, started):
    folder = look(recipe())
    folder.begin(STRATEGY, DATA, 1, 8)
    folder.end(3, stopped=True)
    record = json.loads((started / "run.json").read_text())
    assert (record["finished_steps"], record["interrupted"]) == (0, 3)
    write(recipe())
    assert json.loads((started / "run.json").read_text())["interrupted"] is None


def test_continuing_reports_what_rounds_differently_and_deletes_later_checkpoints(
    recipe, started, checkpoint_of, capsys
):
    checkpoint_of(recipe(), started / "checkpoints", 5)
    folder = look(recipe(resume_from_checkpoint=str(started / "checkpoints/step-00000001")))
    folder.begin(STRATEGY, DATA, folder.loop_state().step, 8)
    out = capsys.readouterr().out
    assert f"continuing after step 1 of 8 ({started}/checkpoints/step-00000001)\nnote: changed since" in out
    starts = json.loads((started / "run.json").read_text())["starts"]
    assert [each["step"] for each in starts] == [0, 1]
    assert "num_processes None -> 2" in out
    assert [path.name for path in (started / "checkpoints").iterdir()] == ["step-00000001"]
    assert sorted(folder.about) == ["identity", "rounding", "strategy", "total_steps", "versions"]


def test_other_ranks_print_and_write_nothing(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    folder = look(recipe())
    folder.open()
    folder.begin(STRATEGY, DATA, 0, 8)
    folder.end(8, stopped=False)
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""
    assert folder.about["strategy"] == STRATEGY.record()


def test_a_base_model_of_the_same_name_with_other_weights_is_another_run(recipe, started):
    assert "the weights at model_name_or_path are others" in refusal(recipe(), "abc", "other")
    text = refusal(recipe(model_name_or_path="elsewhere"), "abc", "other")
    assert "model_name_or_path: 'model' -> 'elsewhere'" in text and "the weights at" not in text


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(recipe, tmp_path, checkpoint_of):
    path = checkpoint_of(recipe(seed=1), tmp_path / "other", 3)
    same = look(recipe(seed=1, resume_from_checkpoint=str(path)))
    assert same.checkpoint == path and same.loop_state().step == 3
    with pytest.raises(UserError, match=r"resume_from_checkpoint: .* is of another run \(seed: 1 -> 2\)"):
        look(recipe(seed=2, resume_from_checkpoint=str(path)))


# One run at a time

HOLDING = """
import sys
sys.path.insert(0, sys.argv[1])
from kit.config.recipe import Recipe
from kit.failures.exits import leave, reporting_errors
from kit.run.folder import RunFolder
recipe = Recipe(model_name_or_path="m", dataset="d", output_dir=sys.argv[2])
with reporting_errors():
    RunFolder(recipe, "mine", {}).open()
    print("open", flush=True)
    exec(sys.stdin.readline())
"""


@pytest.fixture
def holder(tmp_path):
    """Starts processes that hold the folder ``out``, and tells what they say of it."""
    started = []

    def start():
        words = [sys.executable, "-c", HOLDING, str(ROOT), str(tmp_path / "out")]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        said = ""
        while (line := process.stdout.readline()) != "open\n":
            assert line, "it has ended"
            said += line
        return process, said

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_second_run_is_locked_out_by_who_is_at_work_and_changes_nothing(recipe, holder, tmp_path):
    late, overwriting = look(recipe()), look(recipe(overwrite_output_dir=True))
    process, notes = holder()
    assert notes == ""
    folder = tmp_path / "out"
    with pytest.raises(UserError, match=rf"in use by process {process.pid} on .* \(since"):
        late.open()  # both found the folder empty
    write(recipe())
    before = content(folder)
    for others in ({}, {"overwrite_output_dir": True}, {"seed": 7}):
        assert f"in use by process {process.pid} on" in refusal(recipe(**others))
    with pytest.raises(UserError, match="in use by process"):
        overwriting.open()
    assert content(folder) == before


@pytest.mark.slow
def test_the_lock_of_a_dead_process_is_taken_over_with_a_notice(recipe, holder, tmp_path):
    process, _ = holder()
    write(recipe())
    process.kill()
    process.wait()
    assert look(recipe()).finished_steps == 0
    second, notes = holder()
    assert f"process {process.pid} on " in notes and "was killed: taking over" in notes
    assert f"process {second.pid} on" in refusal(recipe())


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "leave(75)", "raise ValueError('odd')"])
def test_there_is_no_notice_after_a_run_that_ended_in_order(recipe, holder, tmp_path, end):
    process, _ = holder()
    write(recipe())
    process.communicate(end + "\n", timeout=60)
    assert "taking over" not in holder()[1]


def test_a_run_that_lost_its_checkpoints_says_that_it_begins_again(recipe, capsys):
    begin(recipe())
    write(recipe())
    assert capsys.readouterr().out == ""
    begin(recipe())
    assert "holds this run and no checkpoint: it begins again from the first step" in capsys.readouterr().out
    begin(recipe(overwrite_output_dir=True))
    assert capsys.readouterr().out == ""


def test_a_lock_file_that_is_a_link_is_not_followed(recipe, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out/.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="output_dir: "):
        begin(recipe())
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_run_that_was_at_work_between_the_check_and_the_lock_is_not_overwritten(recipe, tmp_path):
    folder = tmp_path / "out"
    late = look(recipe(seed=7))
    begin(recipe(seed=1))
    write(recipe(seed=1), finished_steps=6)
    before = content(folder)
    with pytest.raises(UserError, match=r"another run was at work in .* while this one started"):
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


def test_a_lock_that_cannot_be_read_is_a_users_problem(recipe, tmp_path):
    (tmp_path / "out/.lock").mkdir(parents=True)
    with pytest.raises(UserError, match="output_dir: "):
        begin(recipe())


def test_a_start_killed_before_its_record_does_not_block_the_next(recipe, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.run.json.partial").write_text("{")
    assert look(recipe()).finished_steps == 0


def test_what_killed_starts_began_to_write_is_gone_when_the_run_goes_on(recipe, started):
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


@pytest.fixture
def elsewhere(tmp_path):
    """Files and a checkpoint of another run, which nobody may change."""
    folder = tmp_path / "elsewhere"
    (folder / "checkpoints/step-00000003").mkdir(parents=True)
    (folder / "checkpoints/step-00000003/shard").write_text("precious")
    (folder / "file").write_text("precious")
    before = content(folder)
    yield folder
    assert content(folder) == before


@pytest.mark.parametrize(
    "name", ["checkpoints", "final", "profile", "kit", "run.json", "metrics.jsonl", "error.txt", ".lock"]
)
def test_a_link_in_the_folder_is_refused_by_name_and_deleted_where_overwriting_was_asked_for(
    recipe, started, elsewhere, name
):
    is_folder = name in ("checkpoints", "final", "profile", "kit")
    link = started / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(elsewhere / ("checkpoints" if is_folder else "file"))
    for mine in (recipe(), recipe(resume_from_checkpoint="none")):
        text = refusal(mine)
        assert f"{link} is a link to '{elsewhere}/" in text and "make output_dir itself a link" in text
    if name in ("run.json", ".lock"):  # read or locked before anything is deleted
        assert str(link) in refusal(recipe(overwrite_output_dir=True))
    else:
        begin(recipe(overwrite_output_dir=True))
        assert not link.is_symlink()


@pytest.mark.parametrize(("name", "make"), [("final", Path.touch), ("metrics.jsonl", Path.mkdir), ("kit", os.mkfifo)])
def test_a_file_in_the_place_of_a_folder_and_the_reverse_are_refused(recipe, started, name, make):
    (started / name).unlink(missing_ok=True)
    make(started / name)
    expected = "a file" if name == "metrics.jsonl" else "a folder"
    assert f"output_dir: {started / name} is not {expected}; expected {expected}" in refusal(recipe())


def test_what_lies_where_a_later_checkpoint_will_be_saved_is_refused_before_training(recipe, started, elsewhere):
    checkpoints = started / "checkpoints"
    (checkpoints / "step-00000000").symlink_to(elsewhere)  # a user's: no save comes there any more
    begin(recipe())
    shutil.copytree(checkpoints / "step-00000001", checkpoints / "step-00000003")  # a user's, too
    (checkpoints / "step-00000004").touch()
    assert f"{checkpoints}/step-00000004 is a file; expected nothing, or" in refusal(recipe())
    (checkpoints / "step-00000004").unlink()
    (checkpoints / "step-00000004").symlink_to(elsewhere)
    assert f"{checkpoints}/step-00000004 is a link to '{elsewhere}'; expected nothing" in refusal(recipe())
    begin(recipe(overwrite_output_dir=True))
    assert not checkpoints.exists()


def test_a_copy_of_the_run_by_hard_links_keeps_its_skipped_rows(recipe, started, tmp_path):
    skipped = started / "skipped_rows.jsonl"
    skipped.write_text("{}\n")
    (tmp_path / "copy").hardlink_to(skipped)
    begin(recipe())
    write(recipe())
    with skipped.open("a") as file:  # as a stream does
        file.write("{}\n")
    assert (tmp_path / "copy").read_text() == "{}\n"


def test_a_link_that_leads_nowhere_is_a_users_mistake(recipe, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone/there")
    with pytest.raises(UserError, match="output_dir: "):
        look(recipe())
        begin(recipe())


def test_continuing_with_other_steps_reports_how_the_rate_changes(recipe, started, checkpoint_of, capsys):
    checkpoint_of(recipe(), started / "checkpoints", 5, total_steps=8)
    look(recipe()).begin(STRATEGY, DATA, 5, 8)
    assert "warning" not in capsys.readouterr().out
    look(recipe()).begin(STRATEGY, DATA, 5, 80)
    assert (
        "warning: the run had 8 steps and now has 80, so its learning rates change: step 6 has"
        in capsys.readouterr().out
    )


def test_skipped_rows_are_listed_in_the_folder(recipe, started):
    look(recipe()).begin(STRATEGY, DATA, 0, 8, [{"row": "a.jsonl:3", "problems": ["empty"]}])
    assert (started / "skipped_rows.jsonl").read_text() == '{"row": "a.jsonl:3", "problems": ["empty"]}\n'
