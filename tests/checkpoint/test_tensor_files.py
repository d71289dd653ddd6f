"""Files are plain safetensors, and hold every tensor unchanged."""

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_helpers import same
from safetensors import safe_open
from safetensors.torch import load_file

from kit.checkpoint.load import _read_tensors, _stored
from kit.checkpoint.tensor_files import TensorWriter, write_tensors

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


def test_tensors_are_read_back_also_next_to_a_file_of_another_writer(tmp_path):
    tensors = {name: TENSORS[name].detach() for name in ("matrix", "narrow", "scalar", "number", "odd", "empty")}
    dcp.save(dict(tensors), storage_writer=TensorWriter(tmp_path / "new"), no_dist=True)
    write_tensors(tmp_path / "new/plain.safetensors", {"of another writer": torch.ones(2, 3)}, {})
    tensors["of another writer"] = torch.ones(2, 3)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    _read_tensors(tmp_path / "new", read, _stored(tmp_path / "new"))
    assert same(read, tensors)
