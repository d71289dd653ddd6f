"""A file is the old one or the new one, on the disk before its name, and only at its path."""

import os
import re

import pytest

from kit.system import durable


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
    (_, temporary), *rest = order
    assert re.fullmatch(r"\.run\.json\.[0-9a-f]{8}\.partial", temporary)
    assert rest == [("rename", "run.json"), ("sync", tmp_path.name)]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch, moment):
    def fail(*_):
        raise OSError(28, "No space left on device")

    durable.write_text(tmp_path / "run.json", "old")
    monkeypatch.setattr(os, moment, fail)
    with pytest.raises(OSError, match="No space left"):
        durable.write_text(tmp_path / "run.json", "new")
    assert (tmp_path / "run.json").read_text() == "old" and os.listdir(tmp_path) == ["run.json"]


@pytest.fixture
def precious(tmp_path):
    """A file elsewhere, which nobody may change."""
    path = tmp_path / "elsewhere/precious"
    path.parent.mkdir()
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious" and os.listdir(path.parent) == ["precious"]


@pytest.mark.parametrize("by", ["symlink_to", "hardlink_to"])
def test_a_file_that_replaces_a_link_is_a_new_file(tmp_path, precious, by):
    getattr(tmp_path / "run.json", by)(precious)
    getattr(tmp_path / "shard", by)(precious)
    durable.write_text(tmp_path / "run.json", "new")
    with durable.create(tmp_path / "shard") as file:
        file.write(b"new")
    for name in ("run.json", "shard"):
        assert (tmp_path / name).read_text() == "new" and not (tmp_path / name).is_symlink()


def test_nothing_is_appended_through_a_link_or_to_a_pipe(tmp_path, precious):
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "nowhere").symlink_to(precious.parent / "new")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "nowhere", "pipe"):
        with pytest.raises(OSError):
            durable.open_to_append(tmp_path / name)
    for line in ("one\n", "two\n"):
        with durable.open_to_append(tmp_path / "log") as file:
            file.write(line)
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_removing_a_link_to_a_folder_keeps_its_target(tmp_path, precious):
    (tmp_path / "final").symlink_to(precious.parent)
    durable.make_afresh(tmp_path / "final")
    assert not (tmp_path / "final").is_symlink() and not os.listdir(tmp_path / "final")
    (tmp_path / "final/link").symlink_to(precious.parent)
    durable.remove(tmp_path / "final")
    assert not os.path.lexists(tmp_path / "final")


def test_a_small_file_is_read_and_nothing_else(tmp_path):
    (tmp_path / "a").write_bytes(b"one\r\ntwo\xc3\xbc\r")
    assert durable.read_small(tmp_path / "a") == "one\ntwo\u00fc\n"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(OSError, match="not a regular file"):
            durable.read_small(path)
    with pytest.raises(OSError, match="more than 0 MiB"):
        durable.read_small(tmp_path / "a", 5)
