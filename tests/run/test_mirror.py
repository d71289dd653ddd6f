"""The copy of a run's folder: complete checkpoints only, of this run only, and never in the way of a step."""

import json
import shutil
import threading
import time
from contextlib import suppress

import pytest
from faulty_store import FaultyStore, empty_store
from helpers import forge

from kit.checkpoint.manifest import list_checkpoints, verify
from kit.errors import UserError
from kit.run import mirror
from kit.run.identity import identity
from kit.run.mirror import Mirror

SHARD = "shard-00001.safetensors"


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    """An empty store; attempts follow each other at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kit.stores.PAUSES_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(mirror, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "_PAUSE_SECONDS", 0.01)
    yield empty_store()
    FaultyStore.before = staticmethod(lambda operation, path: None)


class Run:
    """A run without a model: its folder, and its copy."""

    def __init__(self, recipe, checkpoint_of, tmp_path, **changes):
        self.recipe = recipe(**{"mirror_to": "faulty://b/run", **changes})
        self.identity = identity(self.recipe, "abc", "base")
        self.folder = tmp_path / "out"
        self._checkpoint_of = checkpoint_of
        self.mirror = None

    def look(self):
        self.mirror = Mirror(self.recipe, self.folder, self.identity)
        return self.mirror

    def start(self, step=0):
        self.look()
        self.folder.mkdir(exist_ok=True)
        if self.mirror.is_newer:
            self.mirror.restore()
        self.record(0)
        self.mirror.start(step)
        return self

    def record(self, finished):
        recipe = self.recipe.model_dump(mode="json")
        text = json.dumps({"recipe": recipe, "identity": self.identity, "finished_steps": finished})
        (self.folder / "run.json").write_text(text)

    def save(self, step, rows=b"x" * 1000, **state):
        shutil.rmtree(self.folder.parent / "staging", ignore_errors=True)
        path = self._checkpoint_of(self.recipe, self.folder.parent / "staging", step)
        (path / SHARD).write_bytes(rows)
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | {"files": {"state.json": {}, SHARD: {}}}))
        forge(path, {"step": step, "optimizer_scalars": {}, **state})
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        shutil.rmtree(self.folder / "checkpoints" / path.name, ignore_errors=True)
        path.rename(self.folder / "checkpoints" / path.name)  # as a save does

    def end(self, step):
        (self.folder / "final").mkdir(exist_ok=True)
        (self.folder / "final" / "model.safetensors").write_bytes(b"weights" * step)
        self.record(step)
        self.mirror.finish()


@pytest.fixture
def run(recipe, checkpoint_of, tmp_path):
    def run(**changes):
        return Run(recipe, checkpoint_of, tmp_path, **changes)

    return run


def copies():
    """The names of the complete checkpoints of the copy."""
    return sorted(path.split("/")[-2] for path in list(FaultyStore.store) if path.endswith("/manifest.json"))


def wait_for_a_copy():
    end = time.monotonic() + 60
    while not copies():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def lost(run):
    """The disk is empty."""
    shutil.rmtree(run.folder)


def test_an_empty_disk_gets_what_the_run_needs(run, store):
    first = run().start()
    first.save(1)
    first.save(2)
    first.mirror.finish()
    lost(first)
    again = run().start(2)
    assert [path.name for path in list_checkpoints(again.folder / "checkpoints")] == ["step-00000002"]
    assert verify(again.folder / "checkpoints/step-00000002") == []
    assert (again.folder / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    again.end(2)
    assert copies() == ["step-00000001", "step-00000002"]
    assert store.cat_file("/b/run/final/model.safetensors") == b"weights" * 2
    lost(again)
    record = json.loads((run().start(2).folder / "run.json").read_text())
    assert record["finished_steps"] == 0  # final/ is written again


def test_the_copy_keeps_what_the_run_keeps(run):
    first = run(save_total_limit=1, keep_best=True).start()
    for step in (1, 2, 3):
        first.save(step, best={"step": 1})
        first.mirror._is_last.wait(0.05)
    first.mirror.finish()
    assert copies() == ["step-00000001", "step-00000003"]
    lost(first)
    run(save_total_limit=1, keep_best=True).start(3).mirror.finish()
    assert [path.name for path in list_checkpoints(first.folder / "checkpoints")] == copies()


def test_requests_that_fail_are_made_again(run, capsys):
    count = 0

    def fail(operation, path):
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise ConnectionError("reset")

    FaultyStore.before = staticmethod(fail)
    first = run().start()
    first.save(1)
    first.end(1)
    FaultyStore.before = staticmethod(lambda operation, path: None)
    assert copies() == ["step-00000001"]
    lost(first)
    assert verify(run().start(1).folder / "checkpoints/step-00000001") == []
    assert "warning" not in capsys.readouterr().out


def test_a_store_that_is_gone_ends_the_run_only_at_its_end(run, capsys):
    first = run().start()
    first.save(1)
    wait_for_a_copy()

    def gone(operation, path):
        raise ConnectionError("unplugged")

    FaultyStore.before = staticmethod(gone)
    first.save(2)
    reported = refusal(lambda: first.end(2))
    assert "mirror_to: the copy at faulty://b/run is not complete" in reported
    assert f"unplugged); {first.folder} is\n    -> the same command again copies what is missing" in reported
    assert capsys.readouterr().out.count("the run goes on") == 1
    FaultyStore.before = staticmethod(lambda operation, path: None)
    again = run().look()
    again.complete()
    assert copies() == ["step-00000001", "step-00000002"]
    writes = []
    FaultyStore.before = staticmethod(lambda operation, path: writes.append(path) if operation == "write" else None)
    run().look().complete()
    assert set(writes) == {"/b/run/.probe"}


def test_after_a_signal_the_copy_is_awaited_for_a_while_only(run, capsys, monkeypatch):
    monkeypatch.setattr(mirror, "STOPPED_SECONDS", 0.2)
    release = threading.Event()
    FaultyStore.before = staticmethod(lambda operation, path: release.wait(30) if operation == "write" else None)
    first = run()
    release.set()
    first.look()
    release.clear()
    first.folder.mkdir()
    first.record(0)
    first.mirror.start(0)
    first.mirror.finish(is_stopped=True)
    assert "is not complete (not done within 0 s)" in capsys.readouterr().out
    release.set()


@pytest.mark.parametrize("kill_at", range(1, 14, 3))
def test_a_copy_that_is_cut_off_anywhere_is_absent(run, kill_at):
    """From one operation on, the store takes nothing any more, as after a kill."""
    count = 0

    def die(operation, path):
        nonlocal count
        count += operation in ("write", "open", "delete")
        if count > kill_at:
            raise PermissionError("dead")

    first = run().start()
    first.save(1)
    wait_for_a_copy()
    FaultyStore.before = staticmethod(die)
    first.save(2, b"y" * 3000)
    first.save(3, b"z" * 3000)
    with suppress(UserError):
        first.end(3)
    FaultyStore.before = staticmethod(lambda operation, path: None)
    lost(first)
    look = run()
    look.start(3)
    found = list_checkpoints(look.folder / "checkpoints")
    assert found and verify(found[-1]) == []
    for step in range(int(found[-1].name[5:]) + 1, 4):
        look.save(step, b"w" * 2000)
    look.end(3)
    assert copies() == ["step-00000002", "step-00000003"]
    names = [path for path in FaultyStore.store if "/checkpoints/" in path]
    assert len(names) == 2 * 3  # and nothing besides


def test_a_damaged_checkpoint_of_the_disk_is_left_out(run, capsys):
    first = run()
    first.folder.mkdir()
    for step in (1, 2):
        first.save(step)
    path = first.folder / "checkpoints/step-00000001" / SHARD
    path.unlink()
    first.start(2).end(2)
    assert copies() == ["step-00000002"]
    assert capsys.readouterr().out.count(f"warning: {path.parent} is not copied: no {SHARD}") == 1


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_checkpoint_of_the_copy_is_skipped(run, store, damage, capsys):
    first = run().start()
    first.save(1)
    first.save(2)
    first.mirror.finish()
    path = "/b/run/checkpoints/step-00000002/shard-00001.safetensors"
    content = store.cat_file(path)
    store.rm(path) if damage == "missing" else store.pipe_file(path, content[:-1] + b"?")
    lost(first)
    again = run().start(1)
    assert [path.name for path in list_checkpoints(again.folder / "checkpoints")] == ["step-00000001"]
    assert "skipping faulty://b/run/checkpoints/step-00000002: a file is missing or was" in capsys.readouterr().out
    store.pipe_file("/b/run/checkpoints/step-00000001/state.json", b"{}")
    again.mirror.finish()


def test_a_copy_of_another_run_is_refused_and_can_be_overwritten(run, store):
    first = run().start()
    first.save(1)
    first.end(1)
    before = dict(FaultyStore.store)
    other = run(seed=7)
    reported = refusal(other.look)
    assert "mirror_to: faulty://b/run holds another run (seed: 42 -> 7)" in reported
    assert "-> --mirror_to with another place; or --overwrite_output_dir true" in reported
    assert "holds this run already" in refusal(run(resume_from_checkpoint="none").look)
    assert {path for path in FaultyStore.store if path != "/b/run/.probe"} == set(before)
    new = run(seed=7, overwrite_output_dir=True)
    lost(first)
    new.start().mirror.finish()
    assert copies() == []
    assert not any("final" in path for path in FaultyStore.store)


def test_files_of_no_run_are_left_alone(run, store):
    store.pipe_file("/b/run/notes.txt", b"x")
    assert "faulty://b/run is not empty and holds no run (notes.txt)" in refusal(run().look)
    store.pipe_file("/b/run/run.json", b"{}")
    assert "faulty://b/run/run.json is no record of a run" in refusal(run().look)


def test_a_copy_inside_of_the_folder_or_around_it_is_refused(run, tmp_path):
    for place in ("out", "out/copy", ".", f"file://{tmp_path}/out/copy"):
        assert "lie in each other" in refusal(run(mirror_to=place).look)


def test_a_copy_on_a_disk_with_any_name(run, tmp_path):
    name = "a copy of 100% ünï #1/x"
    first = run(mirror_to=str(tmp_path / "disk" / name)).start()
    first.save(1)
    first.end(1)
    lost(first)
    again = run(mirror_to=f"disk/{name}/").start(1)
    assert verify(again.folder / "checkpoints/step-00000001") == []
    again.mirror.finish()
    assert not list((tmp_path / "disk").rglob(".*"))


def test_a_place_that_cannot_be_written_is_refused_at_the_start(run):
    def refuse(operation, path):
        if operation == "write":
            raise PermissionError("Forbidden")

    FaultyStore.before = staticmethod(refuse)
    assert "mirror_to: 'faulty://b/run': not allowed (Forbidden)" in refusal(run().look)
