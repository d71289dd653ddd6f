"""All ranks continue from one whole checkpoint, and hash it once, whatever their number."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kit.checkpoint import manifest
from kit.errors import UserError
from kit.run import resume
from kit.run.resume import choose, choose_together

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


@pytest.fixture
def all_ranks(monkeypatch, folder):
    """``choose_together`` as on rank 1; what the other ranks find is gathered."""

    def all_ranks(world, wanted="auto"):
        looked_at, verify = [], resume.verify

        def looking(path, part):
            looked_at.append(path)
            return verify(path, part)

        def gather(found):
            if not looked_at:
                return found
            path = looked_at.pop()
            return [fault for rank in range(world) for fault in verify(path, slice(rank, None, world))]

        monkeypatch.setattr(resume, "verify", looking)
        monkeypatch.setattr(resume, "together", lambda accelerator: nullcontext())
        monkeypatch.setattr("accelerate.utils.gather_object", gather)
        accelerator = SimpleNamespace(process_index=1, num_processes=world)
        return choose_together(
            accelerator, folder, wanted, manifest.read_manifest(folder / "step-00000003")["identity"]
        )

    return all_ranks


def test_damage_in_the_share_of_another_rank_costs_that_checkpoint_only(folder, all_ranks, capsys):
    assert all_ranks(8)[0] == folder / "step-00000003"
    (folder / "step-00000003/16.bin").write_bytes(bytes(100))  # in the share of rank 0
    path, record = all_ranks(8)
    assert path == folder / "step-00000002" and record["step"] == 2
    assert "step-00000003: 16.bin was altered" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"16\.bin was altered"):
        all_ranks(8, wanted=str(folder / "step-00000003"))
    for step in (1, 2):
        (folder / f"step-0000000{step}/5.bin").unlink()
    with pytest.raises(UserError, match=r"no checkpoint of this run is complete") as caught:
        all_ranks(8)
    assert str(caught.value).count("5.bin is missing") == 2


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
