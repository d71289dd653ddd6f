"""The safetensors files of a checkpoint, written tensor by tensor. torch's own reader reads them.

torch's writer of distributed checkpoints serialises a file into a second copy of its tensors before it writes the first
byte, and the library safetensors keeps all other threads waiting while it writes. Here, the extra memory is one
tensor (if it is on a GPU or not contiguous), and the training loop continues meanwhile.

Form of a file: https://github.com/huggingface/safetensors#format
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kit.checkpoint.manifest import describe_file
from kit.system import durable

_DTYPES = {dtype: name for name, dtype in _TYPES.items()}  # safetensors has them by name
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

    def __init__(
        self,
        folder: Path,
        copies: Mapping[str, torch.Tensor] | None = None,
        publish: Callable[[dict[str, Any]], None] = lambda files: None,
    ) -> None:
        """
        Args:
            copies: of this rank's shard of each tensor: written instead of the tensors, which may change meanwhile.
            publish: called on rank 0 when all ranks have written their files, with ``describe_file`` of each.
        """
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._copies, self._publish = folder, copies, publish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of all tensors, and read it back; called by torch."""
        tensors: dict[str, torch.Tensor] = {}
        offsets = {}
        results = []
        for item in plan.items:
            assert item.tensor_data is not None, "all that is not a tensor is in state.json"
            name = item.index.fqn
            assert name not in tensors, "a rank has one part of a tensor"
            part: Any = self._copies[name] if self._copies is not None else planner.resolve_data(item)
            assert part.shape == item.tensor_data.chunk.sizes
            tensors[name] = part
            offsets[name] = {_OFFSETS: item.tensor_data.chunk.offsets}
        if tensors:
            metadata = {_SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            path = self._folder / f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
            write_tensors(path, tensors, metadata)
            results = [WriteResult(plan.items[0].index, path.stat().st_size, (path.name, describe_file(path)))]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the files of all ranks; called by torch on rank 0. Its errors are raised on all ranks."""
        self._publish(dict(result.storage_data for own in results for result in own))
