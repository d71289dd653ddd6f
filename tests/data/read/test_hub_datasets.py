"""Datasets of the hub: the rows of lines, what there is to choose from, and the revision that was named."""

from types import SimpleNamespace

import pytest
from data_helpers import contents, json_lines, refused, source_of, text_rows

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train-*}
  - {split: test, path: test.jsonl}
- config_name: socratic
  data_files:
  - {split: train, path: test.jsonl}
---
"""


@pytest.fixture
def hub(tmp_path_factory, monkeypatch):
    """A dataset with two configs that the library knows as ``someone/sums``, read by the library's own code."""
    import datasets

    source, cache = tmp_path_factory.mktemp("sums"), str(tmp_path_factory.mktemp("hub-cache"))
    for i in range(2):
        (source / f"train-{i}.jsonl").write_bytes(json_lines(text_rows(1500, 1500 * i)))
    (source / "test.jsonl").write_bytes(json_lines(text_rows(3)))
    (source / "README.md").write_text(CARD)

    def load(name, config, **options):
        assert name == "someone/sums"
        return real(str(source), config, cache_dir=cache, **options)

    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "someone/sums"


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_data_set_has_a_config_and_splits(hub, streaming):
    source = source_of(hub, config="main", streaming=streaming)
    assert contents(source) == text_rows(3000)
    assert contents(source, ["n"])[1700] == {"n": 1700}
    assert (source.columns, source.name) == (["text", "n"], "someone/sums[main, train]")
    assert len(source.parts) == (2 if streaming else 1)
    assert source.origin(0, 2) == f"someone/sums[main, train]{' shard 0' if streaming else ''} row 2"
    other = source_of(hub, "test", config="main", streaming=streaming)
    assert contents(other) == text_rows(3) and other.digest != source.digest
    assert source_of(hub, config="socratic", streaming=streaming).digest not in (source.digest, other.digest)
    assert source_of(hub, config="main", streaming=streaming).digest == source.digest


def test_what_a_hub_data_set_offers_is_reported(hub):
    for split, config, where, offered in (
        ("train", None, "dataset_config", ["main", "socratic"]),
        ("train", "mian", "dataset_config", ["main", "socratic"]),
        ("tset", "main", "dataset_split", ["train", "test"]),
    ):
        reported = refused(hub, split, config=config, streaming=split == "tset")
        assert f"error: {where}: someone/sums: " in reported and f"expected one of them as --{where}" in reported
        assert all(name in reported for name in offered)


def test_an_unreachable_hub_is_reported_without_retries(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    reported = refused("someone/something")
    assert "the hub cannot be reached (no route)" in reported and "give a local path, or connect" in reported


# Revisions


COMMITS = {"v1": "1" * 40, "main": "2" * 40}


@pytest.fixture
def revisions(tmp_path, monkeypatch):
    """A dataset of one row, which names its commit; the library's cache has it in a folder named after the commit.

    The value is the calls of ``load_dataset``, and a dict whose "cached" is the commit that is opened offline.
    """
    import datasets

    calls, state = [], {"cached": COMMITS["main"]}

    def load(name, config, split, streaming, revision=None):
        calls.append(revision)
        offline = constants.HF_HUB_OFFLINE
        commit = state["cached"] if offline else revision or COMMITS["main"]
        made = datasets.Dataset.from_dict({"text": [commit]})
        if streaming:
            return made.to_iterable_dataset()
        folder = tmp_path / "cache" / commit
        made.save_to_disk(str(folder))
        return datasets.Dataset.from_file(str(folder / "data-00000-of-00001.arrow"))

    def info(self, name, revision=None, timeout=None):
        return SimpleNamespace(sha=COMMITS.get(revision or "main", revision), gated=False)

    from huggingface_hub import constants

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return calls, state


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("revision", [None, "main", "v1", COMMITS["v1"]])
def test_the_revision_that_is_asked_for_is_read_and_its_commit_is_known(revisions, revision, streaming):
    source = source_of("someone/something", streaming=streaming, revision=revision)
    commit = COMMITS.get(revision or "main", revision)
    assert contents(source) == [{"text": commit}] and source.commit == commit
    # A tag may be moved between two requests: the library is asked for the commit.
    assert revisions[0] == [None if revision in (None, "main") else commit]


def test_offline_a_revision_is_taken_only_from_a_copy_of_its_commit(revisions, monkeypatch):
    _, state = revisions
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "someone/something"
    assert source_of(name).commit == COMMITS["main"]
    reported = refused(name, revision=COMMITS["v1"])
    assert f"in the cache is of commit {COMMITS['main']}; expected that of '{COMMITS['v1']}'" in reported
    state["cached"] = COMMITS["v1"]
    assert source_of(name, revision=COMMITS["v1"]).commit == COMMITS["v1"]
    assert "expected that of 'v1'" in refused(name, revision="v1")  # nothing says which commit it is
    assert "is of commit unknown" in refused(name, revision="v1", streaming=True)
