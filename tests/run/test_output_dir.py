"""An unfinished run is not passed over because the config has another name, and a folder that cannot be is refused."""

import json
from pathlib import Path

import pytest

from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.run.folder import RunFolder
from kit.run.identity import identity
from kit.run.output_dir import check_owner, unfinished_elsewhere

NOTE = "note: runs/mine-fsdp holds an unfinished run of this recipe; --output_dir runs/mine-fsdp continues it"


@pytest.fixture
def killed(recipe, checkpoint_of, tmp_path, monkeypatch):
    """Writes what a run in ``runs/<name>`` left when it was killed."""
    monkeypatch.chdir(tmp_path)

    def killed(name, step=3, finished_steps=0):
        folder = Path("runs") / name
        checkpoint_of(recipe(), folder / "checkpoints", step)
        record = {"identity": identity(recipe(), "abc", "base"), "finished_steps": finished_steps}
        (folder / "run.json").write_text(json.dumps(record))
        return folder

    return killed


@pytest.fixture
def outlook(recipe):
    """What a dry run of eight steps says of its folder."""

    def outlook(output_dir, **changes):
        mine = recipe(output_dir=output_dir, **changes)
        return RunFolder(mine, "mine", identity(mine, "abc", "base")).describe_resume(8)

    return outlook


def test_under_another_config_a_note_names_the_folder_of_the_unfinished_run(killed, outlook, recipe, capsys):
    killed("mine-fsdp")
    assert outlook("runs/mine-single") == [NOTE]
    mine = recipe(output_dir="runs/mine-single")
    RunFolder(mine, "mine", identity(mine, "abc", "base")).open()
    assert NOTE in capsys.readouterr().out


def test_of_several_the_one_that_came_farthest_is_named(killed, outlook):
    for name, step in (("mine-ddp", 2), ("mine-fsdp", 12), ("mine-fsdp1", 7)):
        killed(name, step)
    assert outlook("runs/mine-single") == [NOTE]


def test_a_dry_run_says_after_which_step_the_run_would_continue(killed, outlook):
    folder = killed("mine-single")
    killed("mine-fsdp", step=5)
    assert outlook(str(folder)) == [f"would continue after step 3 of 8 ({folder}/checkpoints/step-00000003)"]


def test_there_is_no_note_of_a_run_that_is_finished_or_another_or_where_the_user_chose(killed, outlook):
    killed("mine-fsdp", finished_steps=3)
    assert outlook("runs/mine-single") == []
    killed("mine-ddp")
    assert outlook("runs/mine-single", seed=7) == []
    assert outlook("elsewhere/mine-single") == outlook("runs/other") == []
    assert outlook("runs/mine-single", resume_from_checkpoint="none") == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_folder_that_cannot_be_made_is_refused_before_the_run(outlook):
    with pytest.raises(UserError) as caught:
        outlook("/proc/nowhere/run")
    assert [problem.where for problem in caught.value.problems] == ["output_dir"]


@pytest.mark.parametrize(
    ("dataset", "advice"),
    [
        ("org/chats", "--dataset_revision c0ffee takes the data as they were; or --output_dir runs/mine-single-2"),
        ([{"path": "org/chats"}, {"path": "b.jsonl"}], "in the list of data sets, org/chats revision: c0ffee; or"),
    ],
)
def test_if_the_hub_has_other_data_now_the_revision_of_before_is_named(killed, recipe, dataset, advice):
    folder = killed("mine-single")
    mine = recipe(output_dir=str(folder), dataset=dataset)
    record = json.loads((folder / "run.json").read_text())
    record["recipe"] = mine.model_dump(mode="json")
    record["data"] = {"sources": [{"name": "org/chats", "commit": "c0ffee"}, {"name": "b"}]}
    (folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="the samples that dataset gives are others") as caught:
        RunFolder(mine, "mine", identity(mine, "other", "base")).describe_resume(8)
    assert advice in caught.value.problems[0].fix


@pytest.mark.parametrize("text", ["[" * 100_000, '{"identity": {}, "finished_steps": Infinity}', "[]", ""])
def test_a_folder_with_a_damaged_record_is_refused_not_overwritten(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    recipe = Recipe(model_name_or_path="m", dataset="d.jsonl", max_length=8, output_dir=str(tmp_path))
    with pytest.raises(UserError, match="is no record of a run"):
        check_owner(recipe, tmp_path, {})
    assert (tmp_path / "run.json").read_text() == text
    assert unfinished_elsewhere(tmp_path.parent / f"{tmp_path.name}2", "tiny", {}) == []
