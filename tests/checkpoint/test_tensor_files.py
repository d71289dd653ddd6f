"""Files are plain safetensors, whatever wrote them, and hold every tensor as it was."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_helpers import same
from safetensors import safe_open
from safetensors.torch import load_file

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


def test_every_tensor_begins_where_its_elements_are_aligned(tmp_path):
    """Readers map files into memory and use the numbers in place."""
    write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2)}, {})
    content = (tmp_path / "a.safetensors").read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0
    assert content.endswith(torch.ones(2).numpy().tobytes() + bytes([1, 1, 1]))


def test_torch_reads_a_checkpoint_of_this_writer(tmp_path):
    tensors = {name: TENSORS[name].detach() for name in ("matrix", "narrow", "scalar", "number", "odd")}
    dcp.save(dict(tensors), storage_writer=TensorWriter(tmp_path / "new"), no_dist=True)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["shard-00001.safetensors"]
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "new")), no_dist=True)
    assert same(read, tensors)


def test_a_folder_that_is_gone_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_tensors(tmp_path / "gone/a.safetensors", TENSORS, {})
