"""Files are plain safetensors, whatever wrote them, and hold every tensor as it was."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_helpers import same
from safetensors import safe_open
from safetensors.torch import load_file

from kit.checkpoint.load import _read_tensors, _stored
from kit.checkpoint.tensor_files import TensorWriter, write_tensors
from kit.system.errors import UserError

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


def test_what_is_written_is_read_back_also_beside_a_file_of_another_writer(tmp_path):
    tensors = {name: TENSORS[name].detach() for name in ("matrix", "narrow", "scalar", "number", "odd", "empty")}
    dcp.save(dict(tensors), storage_writer=TensorWriter(tmp_path / "new"), no_dist=True)
    write_tensors(tmp_path / "new/plain.safetensors", {"of another writer": torch.ones(2, 3)}, {})
    tensors["of another writer"] = torch.ones(2, 3)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    _read_tensors(tmp_path / "new", read, _stored(tmp_path / "new"))
    assert same(read, tensors)


def test_a_damaged_header_is_reported(tmp_path):
    file = tmp_path / "a.safetensors"
    write_tensors(file, {"a": torch.ones(2, 3)}, {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, 0]}})})
    whole = file.read_bytes()
    for damaged in (b"", whole[:20], (2**62).to_bytes(8, "little") + whole[8:], whole.replace(b"F32", b"F33")):
        assert damaged != whole
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="a safetensors file has a damaged header"):
            _stored(tmp_path)


def test_a_tensor_of_which_a_file_is_missing_is_not_read(tmp_path):
    for number in range(3):
        header = {"DCP_SHARDING_INFO": json.dumps({"rows": {"saved_offsets": [2 * number, 0]}})}
        write_tensors(tmp_path / f"{number}.safetensors", {"rows": torch.ones(2, 3)}, header)
    read = {"rows": torch.zeros(6, 3)}
    _read_tensors(tmp_path, read, _stored(tmp_path))
    assert torch.equal(read["rows"], torch.ones(6, 3))
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(UserError, match="its files lack a part of rows"):
        _read_tensors(tmp_path, read, _stored(tmp_path))
