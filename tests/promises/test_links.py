"""A run writes to its folder only: no link that somebody put there makes it change, or delete, anything elsewhere.

The paths to put links at are those that a run leaves, so a new file is covered from its first day.
"""

import json
import re
import shutil

import pytest

from kit.config.recipe import Recipe
from kit.run.folder import RunFolder
from kit.system.errors import UserError

pytestmark = pytest.mark.slow

STREAM = {"streaming": "true", "on_bad_row": "skip"}
FLAGS = {"method": "lora", "save_steps": 1, "eval_steps": 1, "predict_with_generate": "true", "max_new_tokens": 4}
FLAGS |= {"max_eval_samples": 2}
FLAGS |= {"report_to": "tensorboard", "save_total_limit": 2}


# Paths of a run that are there for a moment, or after an error only. All others lie in its folder at its end.
PASSING = [".lock", ".final.partial", "error.txt", "checkpoints/.step-00000003.partial"]


def tree(folder):
    """All that is in a folder, with contents and times."""
    paths = sorted(folder.rglob("*"))
    return [(str(path), path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in paths]


class Victim:
    """Files and folders of somebody, to which links lead."""

    def __init__(self, folder):
        self.folder = folder / "victim"
        for name in ("file", "folder/step-00000003/manifest.json", "folder/step-00000002/state.json", "folder/x/y"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(f"precious {name}")
        self._was = tree(self.folder)

    def plant(self, path, kind):
        """Put a link in the place of ``path``."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(self.folder / kind)

    def is_whole(self):
        return tree(self.folder) == self._was


class Stage:
    """A run that others left after two steps, and the paths that it writes when it is continued to three."""

    def __init__(self, finetune, dataset):
        self.finetune, self.folder = finetune, finetune.folder
        self.flags = FLAGS | STREAM | {"dataset": dataset, "eval_dataset": finetune.defaults["dataset"]}
        first = finetune("run", **self.flags, max_steps=2)
        assert first.status == 0, first.output
        self.template = self.folder / "template"
        shutil.copytree(first.folder, self.template)
        self.whole = finetune("run", **self.flags, max_steps=3)
        assert self.whole.status == 0, self.whole.output
        found = [*self.whole.folder.rglob("*"), *(self.whole.folder / name for name in PASSING)]
        self.folders = {str(path.relative_to(first.folder)) for path in found if path.is_dir()}
        self.folders |= {name for name in PASSING if name.endswith(".partial")}
        names = {str(path.relative_to(first.folder)) for path in found}
        self.names = sorted(name for name in names if not re.search(r"/\d{10}|tfevents", name))  # with the time

    def set_up(self):
        """Put the run of the others into the output folder again."""
        shutil.rmtree(self.whole.folder, ignore_errors=True)
        shutil.copytree(self.template, self.whole.folder)

    def refusal(self):
        """What a start says to the folder as it is; empty if it takes it."""
        record = json.loads((self.template / "run.json").read_text())
        try:
            RunFolder(Recipe(**record["recipe"] | {"max_steps": 3}), "mine", record["identity"])
        except UserError as error:
            return str(error)
        return ""

    def kind(self, name):
        return "folder" if name in self.folders else "file"


@pytest.fixture
def stage(finetune, chat_file, tmp_path):
    rows = chat_file.read_text().splitlines()
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("\n".join([*rows[:3], '{"messages": []}', *rows[3:]]) + "\n")
    return Stage(finetune, dataset)


def test_no_link_in_a_run_of_others_leads_a_write_out_of_it(stage, tmp_path):
    """Each path that a run writes is refused before the run where a link is, or the link is deleted."""
    expected = "run.json metrics.jsonl checkpoints final report.html skipped_rows.jsonl checkpoints/step-00000003"
    assert {*expected.split(), *PASSING} <= set(stage.names)
    victim = Victim(tmp_path)
    taken = []
    for name in stage.names:
        for target in (stage.kind(name), "absent"):
            stage.set_up()
            path = stage.whole.folder / name
            victim.plant(path, target)
            refusal = stage.refusal()
            assert str(path) in refusal or not refusal, refusal
            taken += [name] if not refusal and name not in taken else []
    assert victim.is_whole()
    assert taken and not {"checkpoints", "final", "metrics.jsonl", "error.txt", "kit", ".lock"} & set(taken)

    # What is not refused, in two real runs: links at folders, and links in folders. The second one cannot continue from
    # the newest checkpoint, of which each file is a link, so it continues from the one before.
    inner = [name for name in taken if not name.startswith("checkpoints/step-00000001/")]
    for planted in ([name for name in taken if name in stage.folders], [n for n in inner if n not in stage.folders]):
        stage.set_up()
        for name in planted:
            victim.plant(stage.whole.folder / name, stage.kind(name))
        run = stage.finetune("run", **stage.flags, max_steps=3)
        assert run.status == 0, run.output
        assert victim.is_whole(), planted
        assert run.losses == stage.whole.losses
        links = [str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_symlink()]
        assert set(links) <= {"checkpoints/step-00000001"}  # before the steps of this start: nothing is written there
