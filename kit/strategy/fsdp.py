"""FSDP through Accelerate: the plugin, its use on a CPU, and which modules came out sharded."""

import os
from typing import TYPE_CHECKING, Any

from kit.strategy.topology import Topology

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def fsdp_plugin(topology: Topology) -> Any:
    """Accelerate's plugin for the FSDP1 or FSDP2 of ``topology``."""
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    shared: dict[str, Any] = {
        "cpu_offload": topology.offload,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": topology.load_on_rank0,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": False,
    }
    bf16 = topology.mixed_precision == "bf16"
    if topology.strategy == "fsdp2":
        # Gradients are reduced in fp32; outputs keep their type, so that the loss stays fp32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=topology.reshard_after_forward,
            mixed_precision_policy=policy,
            **shared,
        )
    # Buffers stay fp32: rotary frequencies lose long positions in bf16.
    policy1 = (
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
        if bf16
        else None
    )
    return FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="FULL_SHARD" if topology.reshard_after_forward else "SHARD_GRAD_OP",
        use_orig_params=True,
        backward_prefetch="BACKWARD_PRE",
        sync_module_states=topology.load_on_rank0,
        mixed_precision_policy=policy1,
        **shared,
    )


def force_fsdp(accelerator: "Accelerator", plugin: Any) -> None:
    """Accelerate offers no FSDP on a CPU and would quietly run DDP; torch itself shards there very well."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def fsdp1_adapter_policy(model: "torch.nn.Module", classes: tuple[str, ...]) -> Any:
    """FSDP1 flattens a unit into one tensor, so trainable leaves need units of their own."""
    from peft.utils.other import fsdp_auto_wrap_policy

    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(classes)
    return fsdp_auto_wrap_policy(model)


def is_sharded_layer(module: "torch.nn.Module", classes: tuple[str, ...]) -> bool:
    """Whether ``module`` is a layer of one of ``classes`` that is a unit of FSDP1 or FSDP2 by itself."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return type(module.module).__name__ in classes
    return isinstance(module, FSDPModule) and type(module).__name__.removeprefix("FSDP") in classes
