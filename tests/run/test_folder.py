"""Whose output folder it is: a run goes on in its own, and nothing of anybody else is touched."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT

from kit.config.recipe import IDENTITY, Recipe
from kit.errors import UserError
from kit.run.folder import (
    check_checkpoint,
    check_output_dir,
    check_start,
    open_output_dir,
    snapshot,
    wanted_checkpoint,
    write_run_file,
)
from kit.run.identity import changes, identity
from kit.run.record import versions
from kit.strategy import accelerator as strategy

# What may change between two starts of one run: it does not change what a step computes, but for rounding.
MAY_CHANGE = """
trust_remote_code attn_implementation gradient_checkpointing dataset dataset_split dataset_config dataset_num_proc
eval_dataset_config
per_device_train_batch_size num_train_epochs max_steps
eval_dataset eval_dataset_split eval_split_size max_eval_samples eval_steps eval_on_start predict_with_generate
max_new_tokens output_dir overwrite_output_dir save_steps save_total_limit resume_from_checkpoint logging_steps
report_to deterministic ddp_timeout keep_best async_save max_nonfinite_steps loss_spike_ratio check_replicas
""".split()
DATA = {"fingerprint": "abc"}


def check(recipe, data="abc", model="base"):
    return check_output_dir(recipe, identity(recipe, data, model))


def begin(recipe, seen=None):
    seen = snapshot(Path(recipe.output_dir)) if seen is None else seen
    return open_output_dir(recipe, identity(recipe, "abc", "base"), seen)


def write(folder, recipe, **steps):
    about = {"identity": identity(recipe, "abc", "base"), "strategy": {"type": "ddp"}, "versions": versions()}
    write_run_file(folder, recipe, "mine", about, DATA, **steps)


@pytest.fixture
def recipe(tmp_path):
    def recipe(**changes):
        return Recipe(
            **{"model_name_or_path": "model", "dataset": "train.jsonl", "output_dir": str(tmp_path / "out"), **changes}
        )

    return recipe


@pytest.fixture
def started(recipe, tmp_path):
    """A folder in which a run was started, with a checkpoint."""
    check(recipe())
    begin(recipe())
    folder = tmp_path / "out"
    write(folder, recipe())
    (folder / "checkpoints/step-00000001").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def refusal(recipe, *fingerprints):
    with pytest.raises(UserError) as caught:
        check(recipe, *fingerprints)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].where == "output_dir"
    return str(caught.value)


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_every_setting_is_either_part_of_a_runs_identity_or_free_to_change():
    """A new setting must be put on one of the two lists."""
    assert sorted(IDENTITY + MAY_CHANGE) == sorted(Recipe.model_fields)


def test_the_docs_say_of_every_setting_whether_it_may_change():
    page = (ROOT / "docs/recovery.md").read_text()
    section = page[page.index("## Which settings may change") : page.index("Such a change is refused")]
    free, other = section.split("| makes it another run |")
    for text, keys in ((free, MAY_CHANGE), (other, IDENTITY)):
        assert sorted(set(re.findall(r"`(\w+)`", text))) == sorted(keys)


@pytest.mark.parametrize("path", ["new", "new/in/new", "empty"])
def test_a_new_or_empty_folder_is_taken(recipe, tmp_path, path):
    (tmp_path / "empty").mkdir()
    mine = recipe(output_dir=str(tmp_path / path))
    check(mine)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "empty"]  # to check is not to make
    begin(mine)
    assert (tmp_path / path).is_dir()


def test_the_same_command_again_goes_on(recipe, started):
    before = content(started)
    check(recipe())
    begin(recipe())
    assert content(started) == before


def test_what_does_not_change_a_step_may_change(recipe, started):
    changes = {"max_steps": 9, "per_device_train_batch_size": 2, "save_steps": 5, "logging_steps": 3, "eval_steps": 2}
    check(recipe(**changes, eval_dataset="e.jsonl", report_to="tensorboard"))


def test_another_run_is_refused_with_every_setting_that_differs(recipe, started):
    text = refusal(recipe(learning_rate=0.5, lora_r=3, seed=7), "other")
    for line in (
        "learning_rate: 0.0002 -> 0.5",
        "lora_r: 16 -> 3",
        "seed: 42 -> 7",
        "the samples that dataset gives are others",
    ):
        assert line in text
    assert "max_steps" not in text and "weight_decay" not in text
    assert "--output_dir" in text and "--overwrite_output_dir" in text


@pytest.mark.parametrize("setting", [name for name in IDENTITY if name not in ("method", "model_name_or_path")])
def test_each_setting_of_the_identity_is_looked_at(recipe, started, setting):
    old = getattr(recipe(), setting)
    others = {"lora_target_modules": "q_proj", "dataset_columns": "a=text", "optim": "adamw_8bit"}
    others |= {"lr_scheduler_type": "linear", "mixing": "tokens", "train_on": "last", "excess_length_strategy": "drop"}
    new = others.get(setting) or (not old if isinstance(old, bool) else 0.5 if isinstance(old, float) else "77")
    assert f"{setting}: " in refusal(recipe(**{setting: new}))


def test_to_start_anew_in_a_runs_folder_one_must_say_so(recipe, started):
    assert "holds this run already" in refusal(recipe(resume_from_checkpoint="none"))
    check(recipe(resume_from_checkpoint="none", overwrite_output_dir=True))


def test_overwriting_deletes_the_earlier_run(recipe, started):
    mine = recipe(overwrite_output_dir=True, seed=7)
    check(mine, "other")
    assert (started / "run.json").exists()
    (started / "notes.txt").write_text("the user's own")
    begin(mine)
    assert sorted(path.name for path in started.iterdir()) == [".lock", "notes.txt", "run.json"]
    # Killed now, it is still known whose the folder is.
    assert check(mine) == 0


def test_overwriting_goes_through_a_link_but_not_out_of_the_folder(recipe, started, tmp_path):
    link, outside = tmp_path / "link", tmp_path / "outside"
    link.symlink_to(started)
    outside.mkdir()
    (outside / "thesis.txt").touch()
    shutil.rmtree(started / "checkpoints")
    (started / "checkpoints").symlink_to(outside)
    mine = recipe(overwrite_output_dir=True, output_dir=str(link))
    check(mine)
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
    assert "choose another --output_dir" in text
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
from kit.run.folder import check_output_dir
if os.geteuid() == 0:  # to root everything is writable
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for folder in sys.argv[2:]:
    try:
        check_output_dir(Recipe(model_name_or_path="m", dataset="d", output_dir=folder), {})
        print("fine")
    except UserError as error:
        print(str(error).splitlines()[0])
"""


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
    assert record["strategy"] == {"type": "ddp"}
    assert record["data"] == DATA
    assert record["versions"]["torch"] and record["versions"]["kit"]
    assert sorted(path.name for path in started.iterdir()) == [".lock", "checkpoints", "metrics.jsonl", "run.json"]


@pytest.mark.parametrize("key", ["dataset", "eval_dataset", "model_name_or_path", "resume_from_checkpoint"])
def test_what_a_run_reads_is_not_overwritten_by_it(recipe, started, key):
    inside = started / "inside"
    inside.mkdir()
    with pytest.raises(UserError, match=f"{key}: .*lies in the output_dir"):
        check(recipe(**{key: str(inside)}, overwrite_output_dir=True))


def test_a_finished_run_is_known_by_the_steps_its_final_model_has(recipe, started):
    assert check(recipe()) == 0
    write(started, recipe(), finished_steps=6)
    assert check(recipe()) == 6
    check_start(recipe(), 6, 6, 8)
    with pytest.raises(UserError, match="no checkpoint to go on from"):
        check_start(recipe(), 6, 0, 8)
    with pytest.raises(UserError, match="4 steps wanted, and 6 are done"):
        check_start(recipe(), 6, 6, 4)


def test_a_base_model_of_the_same_name_with_other_weights_is_another_run(recipe, started):
    assert "the weights at model_name_or_path are others" in refusal(recipe(), "abc", "other")
    text = refusal(recipe(model_name_or_path="elsewhere"), "abc", "other")
    assert "model_name_or_path: 'model' -> 'elsewhere'" in text and "the weights at" not in text


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(recipe, tmp_path):
    one, other = (identity(recipe(seed=seed), "abc", "base") for seed in (1, 2))
    check_checkpoint(tmp_path, one, dict(one))
    with pytest.raises(UserError, match=r"resume_from_checkpoint: .* is of another run \(seed: 1 -> 2\)"):
        check_checkpoint(tmp_path, one, other)


def test_what_makes_other_roundings_is_told_and_nothing_else():
    strategy = {"type": "ddp", "num_processes": 2, "mixed_precision": "bf16", "device": "cpu", "num_threads": 1}
    old = {"strategy": strategy | {"config": "ddp"}, "versions": versions()}
    assert changes(old, {"strategy": strategy | {"config": "mine"}, "versions": versions()}) == []
    new = {"strategy": strategy | {"mixed_precision": "no"}, "versions": versions() | {"torch": "9", "kit": "9"}}
    (told,) = changes(old, new)
    assert "mixed_precision bf16 -> no" in told and f"torch {versions()['torch']} -> 9" in told and "kit" not in told


# One run at a time

HOLDING = """
import sys
sys.path.insert(0, sys.argv[1])
from kit.config.recipe import Recipe
from pathlib import Path
from kit.failures.exits import leave, reporting_errors
from kit.run.folder import open_output_dir, snapshot
recipe = Recipe(model_name_or_path="m", dataset="d", output_dir=sys.argv[2])
with reporting_errors():
    print(open_output_dir(recipe, {}, snapshot(Path(sys.argv[2]))), flush=True)
    exec(sys.stdin.readline())
"""


@pytest.fixture
def holder(tmp_path):
    """Starts processes that hold the folder ``out``."""
    started = []

    def start():
        words = [sys.executable, "-c", HOLDING, str(ROOT), str(tmp_path / "out")]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1], started[-1].stdout.readline()

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_second_run_is_locked_out_by_who_is_at_work_and_changes_nothing(recipe, holder, tmp_path):
    process, notes = holder()
    assert notes == "[]\n"
    folder = tmp_path / "out"
    with pytest.raises(UserError, match=rf"in use by process {process.pid} on .* \(since"):
        begin(recipe())  # both found the folder empty
    write(folder, recipe())
    before = content(folder)
    for others in ({}, {"overwrite_output_dir": True}, {"seed": 7}):
        assert f"in use by process {process.pid} on" in refusal(recipe(**others))
    with pytest.raises(UserError, match="in use by process"):
        begin(recipe(overwrite_output_dir=True))
    assert content(folder) == before


def test_the_lock_of_a_dead_process_is_taken_over_with_a_notice(recipe, holder, tmp_path):
    process, _ = holder()
    write(tmp_path / "out", recipe())
    process.kill()
    process.wait()
    assert check(recipe()) == 0
    second, notes = holder()
    assert f"process {process.pid} on " in notes and "was killed: taking over" in notes
    assert f"process {second.pid} on" in refusal(recipe())


@pytest.mark.parametrize("end", ["pass", "leave(75)", "raise ValueError('odd')"])
def test_a_run_that_ended_by_itself_is_followed_without_a_word(recipe, holder, tmp_path, end):
    process, _ = holder()
    write(tmp_path / "out", recipe())
    process.communicate(end + "\n", timeout=60)
    assert "taking over" not in holder()[1]


def test_a_run_that_lost_its_checkpoints_says_that_it_begins_again(recipe, tmp_path):
    begin(recipe())
    write(tmp_path / "out", recipe())
    (note,) = begin(recipe())
    assert "holds this run and no checkpoint: it begins again from the first step" in note
    assert begin(recipe(overwrite_output_dir=True)) == []


def test_a_lock_file_that_is_a_link_is_not_followed(recipe, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out/.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="output_dir: "):
        begin(recipe())
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_run_that_was_at_work_between_the_look_and_the_lock_is_not_overwritten(recipe, tmp_path):
    folder = tmp_path / "out"
    seen = snapshot(folder)
    begin(recipe(seed=1))
    write(folder, recipe(seed=1), finished_steps=6)
    before = content(folder)
    with pytest.raises(UserError, match=r"another run was at work in .* while this one started"):
        begin(recipe(seed=7), seen)
    assert content(folder) == before


def test_a_path_to_go_on_from_is_obeyed_once(recipe, started, tmp_path):
    """The same command after a kill goes on from what came after it."""
    mine = recipe(resume_from_checkpoint=str(tmp_path / "other/step-00000002"))
    assert wanted_checkpoint(mine) == mine.resume_from_checkpoint
    write(started, mine)
    assert wanted_checkpoint(mine) == mine.resume_from_checkpoint  # killed before it had saved anything
    (started / "checkpoints/step-00000001/manifest.json").touch()
    assert wanted_checkpoint(mine) == "auto"
    assert wanted_checkpoint(recipe(resume_from_checkpoint="elsewhere")) == "elsewhere"
    assert wanted_checkpoint(recipe(overwrite_output_dir=True)) == "none"
    assert wanted_checkpoint(recipe()) == "auto"


def test_a_lock_that_cannot_be_read_is_a_users_problem(recipe, tmp_path):
    (tmp_path / "out/.lock").mkdir(parents=True)
    with pytest.raises(UserError, match="output_dir: "):
        begin(recipe())


def test_a_start_killed_before_its_record_does_not_block_the_next(recipe, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.run.json.partial").write_text("{")
    assert check(recipe()) == 0


def test_a_link_that_leads_nowhere_is_a_users_mistake(recipe, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone/there")
    with pytest.raises(UserError, match="output_dir: "):
        check(recipe())
        begin(recipe())


def test_ranks_that_found_other_data_stop_before_a_step(monkeypatch):
    monkeypatch.setattr("accelerate.utils.gather_object", lambda values: [*values, "other", *values])
    with pytest.raises(
        UserError, match=r"dataset: rank 1 found something else than rank 0; expected the same on every"
    ):
        strategy.agree(None, "dataset", "ours")
    monkeypatch.setattr("accelerate.utils.gather_object", lambda values: values * 3)
    strategy.agree(None, "dataset", "ours")
