"""FSDP through Accelerate: the plugin, FSDP on a CPU, and a check of which modules are sharded."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kit.strategy.topology import Topology

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def fsdp_plugin(topology: Topology) -> Any:
    """Create Accelerate's plugin for the FSDP1 or FSDP2 of ``topology``."""
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    shared: dict[str, Any] = {
        "cpu_offload": topology.strategy.offloads,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": False,  # kit.strategy.sending does it
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": False,
    }
    compute, is_mixed = getattr(torch, topology.compute_dtype), topology.mixed_precision != "no"
    if topology.strategy.name == "fsdp2":
        policy = None
        if is_mixed:  # gradients are reduced in fp32; outputs are not cast, so the loss stays fp32
            policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=topology.reshard_after_forward,
            mixed_precision_policy=policy,
            **shared,
        )
    policy1 = None
    if is_mixed:  # buffers stay fp32: in bf16, distant positions would have the same rotary frequencies
        fp32 = torch.float32
        policy1 = MixedPrecision(compute, reduce_dtype=fp32, buffer_dtype=fp32, cast_forward_inputs=True)
    return FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="FULL_SHARD" if topology.reshard_after_forward else "SHARD_GRAD_OP",
        use_orig_params=True,
        backward_prefetch="BACKWARD_PRE",
        sync_module_states=False,  # every rank has read the same weights
        mixed_precision_policy=policy1,
        **shared,
    )


def replica_groups(topology: Topology) -> Any:
    """Create Accelerate's ``ParallelismConfig`` of HSDP; None if ``topology`` has one replica of the model.

    Neighbouring ranks, which launchers put on one machine, share a replica.
    """
    if topology.num_replicas == 1:
        return None
    from accelerate import ParallelismConfig

    return ParallelismConfig(dp_replicate_size=topology.num_replicas, dp_shard_size=topology.num_shards)


def force_fsdp(accelerator: "Accelerator", plugin: Any, groups: Any = None) -> None:
    """Make ``accelerator`` use FSDP on a CPU, HSDP if there are ``groups``.

    Accelerate would silently use DDP there, although torch supports FSDP on a CPU.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    if groups is not None:
        AcceleratorState._shared_state["parallelism_config"] = groups
        AcceleratorState._shared_state["device_mesh"] = groups.get_device_mesh("cpu")


@contextmanager
def kept_in_bf16(model: "torch.nn.Module") -> Iterator[None]:
    """In the ``with`` block, in which the model is sharded, hide from Accelerate that bf16 weights are trained.

    It would cast them to float32 for FSDP2.
    """
    import torch

    names = {name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.bfloat16}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in names)
    yield
    for name, parameter in model.named_parameters():  # FSDP2 has put its own in their places
        parameter.requires_grad_(parameter.requires_grad or name in names)


def num_replicas(model: "torch.nn.Module") -> int:
    """Return the number of replicas of a sharded model; 1 if all processes share one, or nothing is sharded."""
    return max((num_copies(parameter) for parameter in model.parameters()), default=1)


def own_shard(parameter: "torch.Tensor") -> tuple[int, int]:
    """Return which shard of a weight this rank holds, and how many shards there are; (0, 1) for a whole weight."""
    number = 0
    count = 1
    mesh: Any = getattr(parameter, "device_mesh", None)
    for i, placement in enumerate(getattr(parameter, "placements", ())):
        if not placement.is_replicate():
            number = number * mesh.size(i) + mesh.get_local_rank(i)
            count *= mesh.size(i)
    return number, count


def num_copies(parameter: "torch.Tensor") -> int:
    """Return the number of processes that hold the same shard of a DTensor; 1 for any other tensor."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 1
    placements = getattr(parameter, "placements", ())
    return math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate())


def fsdp1_adapter_policy(model: "torch.nn.Module", classes: tuple[str, ...]) -> Any:
    """Return peft's wrapping policy for FSDP1 with adapters.

    FSDP1 flattens a unit into one tensor, which trains as a whole or not at all. So each trainable module becomes a
    unit of its own.

    Args:
        classes: names of the layer classes to shard.
    """
    from peft.utils.other import fsdp_auto_wrap_policy

    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(classes)
    return fsdp_auto_wrap_policy(model)


def is_sharded_layer(module: "torch.nn.Module", classes: tuple[str, ...]) -> bool:
    """Return whether ``module`` is an FSDP1 or FSDP2 unit around a layer of one of ``classes``."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return type(module.module).__name__ in classes
    return isinstance(module, FSDPModule) and type(module).__name__.removeprefix("FSDP") in classes
