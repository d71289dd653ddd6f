"""Bytes that a run needs on disk, in host memory and on each device, by the parameters of its model.

For a model of any family. Lower bounds: activations, logits and buffers of communication are not counted.
``kit.memory.formulas`` counts these too, for the families that it knows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.config.recipe import Recipe
from kit.memory.sizes import (
    NF4_BYTES,
    WEIGHT_BYTES,
    checkpoint_bytes,
    compute_bytes,
    copied_bytes,
    final_bytes,
    moment_bytes,
    num_checkpoints,
    trained_bytes,
)
from kit.strategy.topology import Topology

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class RunNeeds:
    """What a run needs, in bytes."""

    loading: int  # host memory for weights while they are read, of all ranks of one machine
    host: int  # host memory of training, of all ranks of one machine
    device: int  # memory of each rank's GPU; 0 on a CPU
    checkpoint: int  # disk, each
    num_checkpoints: int | None  # on the disk at once; None: all are kept, of a number that depends on the data
    final: int  # disk


def needs_of_run(
    recipe: Recipe, topology: Topology, model: "torch.nn.Module", local_world: int, dtype: Any
) -> RunNeeds:
    """Return the needs of a run.

    - State of a rank: frozen weights in the compute dtype (``NF4_BYTES`` each if quantised), and for each trainable
      weight its bytes, as many of its gradient and those of its moments; divided by the ranks if they are sharded.
    - Loading: ranks that keep weights on the CPU hold all of them while they read, with ``load_on_rank0`` rank 0 only.
      Others read into their device.
    - Host memory of training: the state where it is on the CPU, and one copy of a checkpoint if saves are asynchronous.
    - Checkpoint: each trainable weight and its moments; divided over the ranks, on one disk.

    Args:
        model: on meta, with its adapters, quantised if the run quantises it.
        local_world: ranks of this machine.
        dtype: of the weights of a full model in ``final/``.
    """
    from kit.model.targets import layer_matrices

    num_parameters = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = frozen_bytes(model, compute_bytes(topology.mixed_precision == "bf16"))
    in_matrices = sum(p.numel() for p in layer_matrices(model)) if recipe.optim == "muon" else 0
    size = trained_bytes(recipe.optim)
    moments = moment_bytes(recipe.optim, trainable, in_matrices, size)
    state = (frozen + trainable * 2 * size + moments) // topology.num_shards

    on_cpu = topology.device_type == "cpu"
    reads_into_cpu = on_cpu or (topology.strategy.shards and (recipe.method != "qlora" or topology.load_on_rank0))
    num_readers = 1 if topology.load_on_rank0 else local_world
    loading = num_readers * (frozen + trainable * WEIGHT_BYTES) if reads_into_cpu else 0

    checkpoint = checkpoint_bytes(trainable, recipe.optim, recipe.save_only_model, in_matrices)
    host = local_world * state if on_cpu or topology.strategy.offloads else 0
    if recipe.async_save:
        host += copied_bytes(checkpoint, local_world, topology.num_processes, topology.num_replicas)
    return RunNeeds(
        loading=loading,
        host=host,
        device=0 if on_cpu or topology.strategy.offloads else state,
        checkpoint=checkpoint,
        num_checkpoints=num_checkpoints(recipe, recipe.max_steps, recipe.num_train_epochs),
        final=final_bytes(recipe.method, num_parameters, trainable, getattr(dtype, "itemsize", 4)),
    )


def frozen_bytes(model: "torch.nn.Module", plain_bytes: int) -> int:
    """Return the bytes of all frozen weights of a model on meta.

    Args:
        plain_bytes: of a weight that is not in 4 bits.
    """
    total = 0.0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            is_4_bit = type(parameter).__name__ == "Params4bit"
            total += parameter.numel() * (NF4_BYTES if is_4_bit else plain_bytes)
    return round(total)
