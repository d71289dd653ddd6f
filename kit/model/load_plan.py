"""How a process must load its weights."""

from dataclasses import dataclass
from typing import Literal

from kit.model.layers.sequence_group import SequenceGroup

ComputeDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """How this process must load weights. The strategy decides it, so that ``kit.model.build`` need not know any."""

    compute_dtype: ComputeDtype  # of frozen weights, and the storage dtype of 4-bit weights
    trained_dtype: ComputeDtype = "float32"  # of trained weights
    device: str  # the device to load weights to
    quantise_on: str | None = None  # the device on which 4-bit weights are made; None: that to which they are loaded
    device_memory: int | None = None  # bytes of the GPU that computes; None: it is not a GPU
    reads_weights: bool = True  # False: build the model on the meta device, the weights come from rank 0
    sequence_group: SequenceGroup | None = None  # the sequence-parallel group
    is_sharded: bool = False  # each layer gathers its weights from all ranks, so all must run the same ones
