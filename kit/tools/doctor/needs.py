"""Bytes that a run needs on disk, in host memory and on each device, from the shapes of its model.

Lower bounds: activations, logits and buffers of communication are not counted. Each function gives its formula.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.config.recipe import Recipe
from kit.memory.formulas import TABLES
from kit.strategy.topology import Topology, shards

if TYPE_CHECKING:
    import torch

NF4_BYTES = 1 / 2 + TABLES  # a weight, with double quantisation
_GRADIENT_BYTES = _MASTER_BYTES = 4  # float32


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs, in bytes."""

    loading: int  # host memory for weights while they are read, of all ranks of one machine
    host: int  # host memory of training, of all ranks of one machine
    device: int  # memory of each rank's GPU; 0 on a CPU
    checkpoint: int  # disk, each
    final: int  # disk


def measure(recipe: Recipe, topology: Topology, model: "torch.nn.Module", local_world: int, dtype: Any) -> Needs:
    """Return the needs of a run.

    - State of a rank: frozen weights in the compute dtype (``NF4_BYTES`` each if quantised), and for each trainable
      weight 4 bytes of itself, 4 of its gradient and those of the optimiser; divided by the ranks if they are sharded.
    - Loading: ranks that keep weights on the CPU hold all of them while they read, with ``load_on_rank0`` rank 0 only.
      Others read into their device.
    - Host memory of training: the state where it is on the CPU, and one copy of a checkpoint if saves are asynchronous.
    - Checkpoint: 4 bytes of each trainable weight and the optimiser's; divided over the ranks, on one disk.

    Args:
        model: on meta, with its adapters, quantised if the run quantises it.
        local_world: ranks of this machine.
        dtype: of the weights of a full model in ``final/``.
    """
    compute_bytes = 2 if topology.mixed_precision == "bf16" else 4
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = frozen_bytes(model, compute_bytes)
    optimizer_bytes = 2 if "8bit" in recipe.optim else 8  # two moments
    state = (frozen + trainable * (_MASTER_BYTES + _GRADIENT_BYTES + optimizer_bytes)) // topology.num_shards
    on_cpu = topology.device_type == "cpu"
    reads_into_cpu = on_cpu or (shards(topology) and (recipe.method != "qlora" or topology.load_on_rank0))
    num_readers = 1 if topology.load_on_rank0 else local_world
    whole = frozen + trainable * _MASTER_BYTES
    checkpoint = trainable * (_MASTER_BYTES + (0 if recipe.save_only_model else optimizer_bytes))
    num_parts = topology.num_processes // topology.num_replicas  # each rank copies its shards of each replica
    copy = checkpoint * local_world // num_parts if recipe.async_save else 0
    num_parameters = sum(p.numel() for p in model.parameters())
    is_full = recipe.method == "full"
    return Needs(
        loading=num_readers * whole if reads_into_cpu else 0,
        host=(local_world * state if on_cpu or topology.offload else 0) + copy,
        device=0 if on_cpu else 0 if topology.offload else state,
        checkpoint=checkpoint,
        final=num_parameters * getattr(dtype, "itemsize", 4) if is_full else trainable * _MASTER_BYTES,
    )


def frozen_bytes(model: "torch.nn.Module", compute_bytes: int) -> int:
    """Return the bytes of all frozen weights of a model on meta."""
    total = 0.0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            is_4_bit = type(parameter).__name__ == "Params4bit"
            total += parameter.numel() * (NF4_BYTES if is_4_bit else compute_bytes)
    return round(total)


def num_checkpoints(recipe: Recipe) -> int | None:
    """Return how many checkpoints are on the disk at once, the one that is being written included; None if unknown."""
    if recipe.save_strategy == "no" or not (recipe.save_steps or recipe.save_strategy == "epoch"):
        return 1  # at the end
    if recipe.save_total_limit:
        return recipe.save_total_limit + 1
    return -(-recipe.max_steps // recipe.save_steps) if recipe.max_steps and recipe.save_steps else None
