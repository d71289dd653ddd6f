"""Data at a URL are copied once, read as local files are, and noticed when they change."""

import fsspec
import pytest
from data_helpers import contents, json_lines, refused, source_of, text_rows
from fsspec.implementations.memory import MemoryFile


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """An empty store; no waiting."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    return filesystem


def put(store, name, rows):
    store.pipe_file(f"/bucket/{name}", json_lines(rows))


def test_a_file_is_what_the_same_local_file_is(store, tmp_path):
    for name in ("a.jsonl", "ünï/my data #1 100%.jsonl", "a[1].jsonl"):
        put(store, name, text_rows(3))
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(json_lines(text_rows(3)))
        source, local = source_of(f"memory://bucket/{name}"), source_of(name.replace("[1]", "[[]1]"))
        assert contents(source) == text_rows(3)
        assert source.digest == local.digest
        assert source.origin(0, 2) == f"memory://bucket/{name}:2"


def test_folders_patterns_and_splits(store):
    for name in ("d/train-0.jsonl", "d/sub/train-1.jsonl", "d/test.jsonl", "e/a.jsonl", "e/b.jsonl"):
        put(store, name, text_rows(2, len(name)))
    store.pipe_file("/bucket/d/README.md", b"hello")
    source = source_of("memory://bucket/d/")
    assert [part.name for part in source.parts] == [
        "memory://bucket/d/sub/train-1.jsonl",
        "memory://bucket/d/train-0.jsonl",
    ]
    assert source.notes == ("memory://bucket/d: 1 files are not read as rows: .md (1)",)
    assert [part.name for part in source_of("memory://bucket/d", "test").parts] == ["memory://bucket/d/test.jsonl"]
    assert [part.name for part in source_of("memory://bucket/**/b.jsonl").parts] == ["memory://bucket/e/b.jsonl"]


def test_a_name_that_leads_out_of_the_cache_is_refused(store, tmp_path):
    name = "/bucket/saved/../../../../evil"
    store.store[name] = MemoryFile(store, name, b"{}")
    assert "has a file called '../../../../evil'; expected no .." in refused("memory://bucket/saved")
    assert not list(tmp_path.rglob("evil")) and not (tmp_path.parent / "evil").exists()


def test_a_second_start_copies_nothing_and_a_changed_object_is_another(store, monkeypatch):
    put(store, "a.jsonl", text_rows(3))
    first = source_of("memory://bucket/a.jsonl")
    gets = []
    get_file = type(store).get_file
    monkeypatch.setattr(type(store), "get_file", lambda self, *a, **k: gets.append(a) or get_file(self, *a, **k))
    assert source_of("memory://bucket/a.jsonl").digest == first.digest
    assert not gets
    put(store, "a.jsonl", text_rows(3, 1))  # of the same size
    second = source_of("memory://bucket/a.jsonl")
    assert second.digest != first.digest
    assert contents(second) == text_rows(3, 1)
    assert len(gets) == 1


def failing(monkeypatch, store, *errors):
    """The next copies raise ``errors``, one each, after half of the bytes."""
    left = list(errors)
    get_file = type(store).get_file

    def get(self, path, to, **options):
        get_file(self, path, to, **options)
        if left and (error := left.pop(0)):
            with open(to, "r+b") as file:
                file.truncate(5)
            raise error

    monkeypatch.setattr(type(store), "get_file", get)


def test_a_copy_that_fails_leaves_nothing_and_is_tried_again_where_that_may_help(store, monkeypatch, cache):
    put(store, "a.jsonl", text_rows(3))
    lost, full = ConnectionError("reset"), OSError(28, "No space left on device")
    for errors, message in (([lost] * 4, "cannot be reached (ConnectionError: reset)"), ([full], "No space left")):
        failing(monkeypatch, store, *errors)
        assert message in refused("memory://bucket/a.jsonl")
        assert not list(cache.parent.rglob("*.jsonl"))
    failing(monkeypatch, store, lost)
    assert contents(source_of("memory://bucket/a.jsonl")) == text_rows(3)


def test_an_object_that_changes_meanwhile_is_refused(store, monkeypatch):
    put(store, "a.jsonl", text_rows(3))
    get_file = type(store).get_file

    def get(self, path, to, **options):
        get_file(self, path, to, **options)
        put(store, "a.jsonl", text_rows(3, 1))

    monkeypatch.setattr(type(store), "get_file", get)
    assert "changed while it was copied" in refused("memory://bucket/a.jsonl")


def test_what_cannot_be_found_is_reported(store):
    put(store, "train.jsonl", text_rows(1))
    store.pipe_file("/bucket/pictures/a.png", b"x")
    reported = refused("memory://bucket/trian.jsonl")
    assert "dataset: nothing at 'memory://bucket/trian.jsonl', or no such bucket" in reported
    assert "did you mean 'memory://bucket/train.jsonl'?" in reported
    assert "nothing at 'memory://bucket/none*.jsonl'" in refused("memory://bucket/none*.jsonl")
    assert "is a folder without data files (.png (1))" in refused("memory://bucket/pictures")
    assert "is not a hub id" in refused("memory://bucket/train.jsonl", revision="main")
