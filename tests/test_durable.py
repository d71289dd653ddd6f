"""A file is the old one or the new one, and on the disk before its name says so."""

import os

import pytest

from kit import durable


@pytest.fixture
def order(monkeypatch):
    """What was synced and renamed, in this order."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_sync(file):
        calls.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
        fsync(file)

    def note_replace(old, new):
        calls.append(("rename", os.path.basename(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    return calls


linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names of open files are in /proc on Linux")


@linux
def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_it_returns(tmp_path, order):
    durable.write_text(tmp_path / "run.json", "new")
    assert (tmp_path / "run.json").read_text() == "new"
    assert order == [("sync", ".run.json.partial"), ("rename", "run.json"), ("sync", tmp_path.name)]


@linux
def test_a_folder_is_synced_after_all_that_is_in_it(tmp_path, order):
    (tmp_path / "final/sub").mkdir(parents=True)
    (tmp_path / "final/sub/file").touch()
    durable.sync_tree(tmp_path / "final")
    assert sorted(order) == [("sync", "file"), ("sync", "final"), ("sync", "sub")] and order[-1] == ("sync", "final")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_what_fails_leaves_the_old_content(tmp_path, monkeypatch, moment):
    def fail(*_):
        raise OSError(28, "No space left on device")

    durable.write_text(tmp_path / "run.json", "old")
    monkeypatch.setattr(os, moment, fail)
    with pytest.raises(OSError, match="No space left"):
        durable.write_text(tmp_path / "run.json", "new")
    assert (tmp_path / "run.json").read_text() == "old"
