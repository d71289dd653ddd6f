"""Before the rendezvous, each rank checks sizes only. Hashing together: tests/promises/test_damage.py."""

import pytest

from kit.checkpoint import manifest
from kit.run.resume import choose

STATE = "state.json"
NUM_FILES = 20


@pytest.fixture
def folder(recipe, tmp_path, checkpoint_of):
    """Three checkpoints, each with ``NUM_FILES`` more files."""
    from helpers import forge

    for step in (1, 2, 3):
        checkpoint_of(recipe(), tmp_path, step)
        path = tmp_path / f"step-{step:08d}"
        for number in range(NUM_FILES):
            (path / f"{number}.bin").write_bytes(bytes([number]) * 100)
        files = {file.name: manifest.describe_file(file) for file in path.iterdir() if file.name != manifest.MANIFEST}
        forge(path, files=files)
    return tmp_path


@pytest.fixture
def hashed(monkeypatch):
    """The names of all files that are hashed."""
    names, describe_file = [], manifest.describe_file
    monkeypatch.setattr(manifest, "describe_file", lambda path: names.append(path.name) or describe_file(path))
    return names


def test_a_rank_that_has_not_met_the_others_reads_sizes_and_the_state_only(folder, hashed, monkeypatch, capsys):
    identity = manifest.read_manifest(folder / "step-00000003")["identity"]
    assert choose(folder, "auto", identity)[0] == folder / "step-00000003" and len(hashed) > NUM_FILES
    hashed.clear()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose(folder, "auto", identity)[0] == folder / "step-00000003" and hashed == [STATE]
    (folder / "step-00000003/17.bin").write_bytes(bytes(99))
    assert choose(folder, "auto", identity)[0] == folder / "step-00000002"
    assert capsys.readouterr().out == ""
