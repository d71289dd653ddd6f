"""Files are plain safetensors, whatever wrote them, and hold every tensor as it was."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_helpers import same
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from kit.checkpoint.tensor_files import TensorReader, TensorWriter, stored_tensors, write_tensors
from kit.errors import UserError

TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "matrix": torch.randn(4, 3),
    "not contiguous": torch.randn(4, 3).T,
    "part of another": torch.randn(100)[5:9],
    "narrow": torch.randn(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "number": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "empty": torch.ones(0, 4),
    "trained": torch.nn.Parameter(torch.randn(2)),
}


def test_the_library_reads_back_every_bit(tmp_path):
    write_tensors(tmp_path / "a.safetensors", TENSORS, {"format": "pt"})
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == TENSORS.keys()
    assert all(same(read[name], TENSORS[name].detach().contiguous()) for name in TENSORS)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


# Read


def test_what_is_stored_is_reported_as_torch_says_it(tmp_path):
    tensors = {name: TENSORS[name].detach() for name in ("matrix", "narrow", "scalar", "number", "odd", "empty")}
    dcp.save(dict(tensors), storage_writer=TensorWriter(tmp_path / "new"), no_dist=True)
    write_tensors(tmp_path / "new/plain.safetensors", {"of another writer": torch.ones(2, 3)}, {})
    metadata = dcp.HuggingFaceStorageReader(str(tmp_path / "new")).read_metadata()
    stored = stored_tensors(tmp_path / "new")
    assert {name: (each.shape, each.dtype) for name, each in stored.items()} == {
        name: (each.size, each.properties.dtype) for name, each in metadata.state_dict_metadata.items()
    }
    tensors["of another writer"] = torch.zeros(2, 3)
    ours = TensorReader(tmp_path / "new", stored, tensors).read_metadata()
    places = {index: place for index, place in metadata.storage_data.items() if index.fqn != "empty"}  # nothing to read
    assert ours.storage_data == places
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(read, storage_reader=TensorReader(tmp_path / "new", stored, read), no_dist=True)
    assert same(read, tensors | {"of another writer": torch.ones(2, 3)})


def test_a_rank_looks_at_what_overlaps_with_its_shard(tmp_path):
    num_files = 8
    for number in range(num_files):
        tensors = {"rows": torch.full((2, 3), number), **({"step": torch.ones(())} if number == 0 else {})}
        offsets = {"rows": {"saved_offsets": [2 * number, 0]}, "step": {"saved_offsets": []}}
        header = {"DCP_SHARDING_INFO": json.dumps(offsets)}
        write_tensors(tmp_path / f"{number:02d}.safetensors", tensors, header)
    stored = stored_tensors(tmp_path)
    assert stored["rows"].shape == (2 * num_files, 3) and stored["step"].shape == ()
    shard = torch.zeros(3, 3)
    shard.__create_chunk_list__ = lambda: [ChunkStorageMetadata(torch.Size([5, 0]), torch.Size([3, 3]))]
    metadata = TensorReader(tmp_path, stored, {"rows": shard, "step": torch.zeros(())}).read_metadata()
    assert {place.relative_path for place in metadata.storage_data.values()} == {
        str(tmp_path / f"{name}.safetensors") for name in ("00", "02", "03")
    }
    assert metadata.state_dict_metadata["rows"].size == (2 * num_files, 3)


def test_a_damaged_header_is_reported(tmp_path):
    file = tmp_path / "a.safetensors"
    write_tensors(file, {"a": torch.ones(2, 3)}, {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, 0]}})})
    whole = file.read_bytes()
    for damaged in (
        b"",
        whole[:20],
        (2**62).to_bytes(8, "little") + whole[8:],
        whole.replace(b"F32", b"F33"),
        whole.replace(b'"shape": [2, 3]', b'"shape": 123456'),
    ):
        assert damaged != whole
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="a safetensors file has a damaged header"):
            stored_tensors(tmp_path)


def test_a_tensor_of_which_a_file_is_missing_has_gaps(tmp_path):
    for number in range(3):
        header = {"DCP_SHARDING_INFO": json.dumps({"rows": {"saved_offsets": [2 * number, 0]}})}
        write_tensors(tmp_path / f"{number}.safetensors", {"rows": torch.ones(2, 3)}, header)
    assert not stored_tensors(tmp_path)["rows"].has_gaps
    (tmp_path / "1.safetensors").unlink()
    assert stored_tensors(tmp_path)["rows"].has_gaps
