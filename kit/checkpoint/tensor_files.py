"""The safetensors files of a checkpoint: write them tensor by tensor, and find in them what a rank needs.

torch's writer of distributed checkpoints serialises a file into a second copy of its tensors before it writes the first
byte, and the library safetensors keeps all other threads waiting while it writes. Here, memory beside the tensors stays
at one tensor (where it is on a GPU or not contiguous), and the training loop goes on meanwhile.

torch's reader opens all files on every rank, and describes every part of every tensor with five objects: with as many
files as ranks, that is their square. Here, one rank reads the headers for all, and a rank then describes only the parts
that it will read.

Form of a file: https://github.com/huggingface/safetensors#format
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._hf_utils import _HFStorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kit import durable
from kit.durable import open_regular
from kit.errors import Problem, UserError

SUFFIX = ".safetensors"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's, in the header: where each part begins


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a new safetensors file and sync it to the disk.

    Args:
        tensors: on any device; each is contiguous in the file.
        metadata: strings for the header.

    Raises:
        OSError: the file cannot be written.
        KeyError: safetensors has no name for a dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    # The widest dtype first, so that every tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with durable.create(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers
        file.flush()
        os.fsync(file.fileno())


class TensorWriter(HuggingFaceStorageWriter):
    """As torch's writer, one file a rank, but with the memory of ``write_tensors``."""

    def __init__(self, folder: Path, copies: Mapping[str, torch.Tensor] | None = None) -> None:
        """
        Args:
            copies: of this rank's part of each tensor: written instead of the tensors, which may change meanwhile.
        """
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._copies = folder, copies

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of all tensors; called by torch."""
        tensors: dict[str, torch.Tensor] = {}
        offsets, results = {}, []
        for item in plan.items:
            assert item.tensor_data is not None, "all that is not a tensor is in state.json"
            name = item.index.fqn
            assert name not in tensors, "a rank has one part of a tensor"
            part: Any = self._copies[name] if self._copies is not None else planner.resolve_data(item)
            assert part.shape == item.tensor_data.chunk.sizes
            tensors[name] = part
            offsets[name] = {_OFFSETS: item.tensor_data.chunk.offsets}
            results.append(WriteResult(item.index, part.numel() * part.element_size(), None))
        if tensors:
            metadata = {_SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            write_tensors(self._folder / f"shard-{plan.storage_data['shard_index']:05d}{SUFFIX}", tensors, metadata)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. Each of its parts is in one file."""

    dtype: torch.dtype
    files: list[str]  # the file name of each part
    boxes: np.ndarray  # [parts, 2, dimensions], int64: where each part begins, and its shape

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.boxes.sum(axis=1).max(axis=0).tolist())

    @property
    def has_gaps(self) -> bool:
        """Whether the parts have fewer elements than the whole tensor: a file is missing."""
        return int(self.boxes[:, 1].prod(axis=1).sum()) < self.shape.numel()

    def parts_of(self, wanted: ChunkStorageMetadata) -> list[int]:
        """The numbers of the parts that overlap with ``wanted``, a part of the same tensor."""
        begins, shapes = self.boxes[:, 0], self.boxes[:, 1]
        ends, wanted_begins = begins + shapes, np.array(wanted.offsets, np.int64)
        overlap = (begins < wanted_begins + np.array(wanted.sizes, np.int64)) & (wanted_begins < ends)
        return np.flatnonzero(overlap.all(axis=1)).tolist()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of all safetensors files of a checkpoint. Returns its tensors by name.

    Raises:
        UserError: a header is not what ``TensorWriter`` writes.
    """
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    found: dict[str, tuple[torch.dtype, list[str], list[list[list[int]]]]] = {}
    try:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            header = _header(path)
            offsets = json.loads(header.pop("__metadata__", {}).get(_SHARDING, "{}"))
            for name, entry in header.items():
                shape = entry["shape"]
                begins = offsets[name][_OFFSETS] if offsets else [0] * len(shape)
                _, files, boxes = found.setdefault(name, (dtypes[entry["dtype"]], [], []))
                files.append(path.name)
                boxes.append([begins, shape])
        return {
            name: StoredTensor(dtype, files, np.array(boxes, np.int64)) for name, (dtype, files, boxes) in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(Problem(str(folder), f"a safetensors file has a damaged header ({error})")) from None


def _header(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size  # a damaged length may be larger than the memory
        return json.loads(file.read(min(int.from_bytes(file.read(8), "little"), size)))


class TensorReader(HuggingFaceStorageReader):
    """As torch's, but it knows what the files hold, and opens only those with a part that this rank reads."""

    def __init__(self, folder: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """
        Args:
            stored: of ``stored_tensors``.
            tensors: those to be read, all of them stored; sharded if the model is.
        """
        super().__init__(str(folder))
        self._metadata = Metadata(state_dict_metadata={}, storage_data={})
        for name, tensor in tensors.items():
            of = stored[name]
            chunks = {}
            for number in (part for wanted in _create_chunk_list(tensor) for part in of.parts_of(wanted)):
                begins, shape = map(torch.Size, of.boxes[number].tolist())
                chunks[number] = ChunkStorageMetadata(begins, shape)
                where = _HFStorageInfo(str(folder / of.files[number]), shape, of.dtype)
                self._metadata.storage_data[MetadataIndex(name, begins)] = where
            self._metadata.state_dict_metadata[name] = TensorStorageMetadata(
                TensorProperties(dtype=of.dtype), of.shape, list(chunks.values())
            )

    def read_metadata(self) -> Metadata:
        """Return what this rank reads of the files; called by torch."""
        return self._metadata
