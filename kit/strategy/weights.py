"""Operations on a model whose weights may be replicated or sharded: generate, gather, compare replicas.

Promises: every function here works under all strategies, so code outside ``kit.strategy`` need not know which one runs.
"""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.strategy.fsdp import is_sharded_layer, num_copies
from kit.strategy.topology import strategy_name
from kit.system.console import say

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@contextmanager
def generating(accelerator: "Accelerator", model: "torch.nn.Module") -> Iterator[Any]:
    """Yield the model's ``generate`` function. All ranks must call it the same number of times.

    Layers run uncompiled: generation would need other graphs than training.
    """
    from accelerate.utils import AutocastKwargs
    from torch.distributed.fsdp import FullyShardedDataParallel, register_fsdp_forward_method

    from kit.model.layers.compile import uncompiled

    inner = accelerator.unwrap_model(model)
    strategy = strategy_name(accelerator)
    options = {"synced_gpus": True} if strategy in ("fsdp1", "fsdp2") else {}
    # With the MoE auxiliary loss on, `generate` would compute it and fail: it has the logits of one token.
    if getattr(inner.config.get_text_config(), "output_router_logits", False):
        options["output_router_logits"] = False
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        if strategy == "fsdp2":
            if "generate" not in vars(inner):
                register_fsdp_forward_method(inner, "generate")
            if _whole_model_fits(accelerator, model):
                stack.enter_context(_kept_unsharded(accelerator, model))
        else:
            # `generate` bypasses the wrapped forward, which enables autocast. Here its copies serve all tokens.
            stack.enter_context(accelerator.autocast(AutocastKwargs(cache_enabled=True)))
        if strategy == "fsdp1":
            stack.enter_context(FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False))
        yield partial(inner.generate, **options)


@contextmanager
def _kept_unsharded(accelerator: "Accelerator", model: "torch.nn.Module") -> Iterator[None]:
    """In the ``with`` block, FSDP2 keeps layers unsharded after a forward pass. Called by all ranks."""
    from torch.distributed.fsdp import FSDPModule

    plugin = accelerator.state.fsdp_plugin
    classes = plugin.transformer_cls_names_to_wrap
    embeddings = accelerator.unwrap_model(model).get_input_embeddings()
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # Accelerate gives these the plugin's setting. The others stay unsharded after a forward pass anyway.
    layers = [unit for unit in units if unit is embeddings or is_sharded_layer(unit, classes)]
    for layer in layers:
        layer.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(plugin.reshard_after_forward, recurse=False)
        reshard(model)


def reshard(model: "torch.nn.Module") -> None:
    """Let FSDP2 reshard the weights that a forward pass left unsharded (the root's). Other strategies have none."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _whole_model_fits(accelerator: "Accelerator", model: "torch.nn.Module") -> bool:
    """Whether all weights fit into half of the free memory of each rank's device. Called by all ranks.

    If not, generation all-gathers every layer for every token, and a line reports that. The other half is for the KV
    cache.
    """
    import psutil
    import torch

    element_size = 4 if accelerator.mixed_precision == "no" else 2  # of the all-gather
    needed = sum(parameter.numel() * element_size for parameter in model.parameters())  # of a DTensor all elements
    if accelerator.device.type == "cpu":
        free = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        free = torch.accelerator.get_memory_info()[0]
    fits = accelerator.gather(torch.tensor([needed <= free // 2], device=accelerator.device)).all().item()
    if not fits:
        why = f"{needed:,} bytes of unsharded weights do not fit"
        say(f"generation is slow: it all-gathers every layer for every token, since {why}")
    return bool(fits)


class InitialWeights:
    """The initial trainable weights of a run, in host memory: the reference model. Each rank keeps its shards."""

    def __init__(self, model: "torch.nn.Module") -> None:
        """Called by all ranks, before a checkpoint is loaded."""
        self._model = model
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._kept = [own_part(weight).detach().to("cpu", copy=True) for weight in self._weights]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """In the ``with`` block, the model has these weights. Afterwards it has its own again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        import torch

        reshard(self._model)  # unsharded weights would not follow
        with torch.no_grad():
            for weight, kept in zip(self._weights, self._kept, strict=True):
                part = own_part(weight)
                now = part.to("cpu", copy=True)
                part.copy_(kept)
                kept.copy_(now)


def replicated(accelerator: "Accelerator", model: "torch.nn.Module") -> "dict[str, torch.nn.Parameter]":
    """Return the replicated parameters, by name: other processes hold the same tensor, or the same shard (HSDP)."""
    if strategy_name(accelerator) in ("single", "fsdp1"):  # FSDP1's shards look like ordinary tensors
        return {}
    return {plain_name(name): p for name, p in model.named_parameters() if num_copies(p) > 1 or not is_sharded(p)}


def gather_trainable(accelerator: "Accelerator", model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Gather trainable weights and buffers by plain names in the CPU memory of rank 0. Called by all ranks.

    Returns an empty dict on all other ranks.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # FSDP1 crashes if it is asked to move tensors to the CPU that are already there.
    on_cpu = any(p.device.type == "cpu" for p in model.parameters())
    to_cpu = not (on_cpu and strategy_name(accelerator) == "fsdp1")
    options = StateDictOptions(full_state_dict=True, cpu_offload=to_cpu, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    return changing_only(model, state) if accelerator.is_main_process else {}


def changing_only(model: "torch.nn.Module", state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``state`` that training may change: trainable parameters and persistent buffers.

    Frozen weights, also tied ones, and quantisation constants, which are no buffers, are left out.
    """
    names = {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
    names |= {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: tensor for name, tensor in state.items() if name in names}


def whole_state(model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Return all parameters, also frozen ones, and persistent buffers, by plain names; sharded if the model is.

    Called by all ranks. Nothing is gathered and nothing copied, except that FSDP1 copies this rank's shards.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model)  # type: ignore[return-value]  # tensors, since the model has no other state


def gather_tensor(tensor: Any) -> "torch.Tensor | None":
    """Return the full tensor of an entry of ``whole_state`` on rank 0, None on all others.

    Called by all ranks. The result is on the device on which the ranks communicate.
    """
    import torch

    rank, _ = rank_and_world()
    if hasattr(tensor, "local_shards"):  # FSDP1
        # `gather` sends from this device, which need not be that of the shards.
        device = tensor._get_preferred_device()
        whole = torch.empty(tensor.size(), dtype=tensor.dtype, device=device) if rank == 0 else None
        tensor.gather(0, whole)
        return whole
    tensor = whole_tensor(tensor)
    return tensor if rank == 0 else None


def gather_whole(model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Gather ``whole_state`` in the CPU memory of rank 0. Called by all ranks; empty on all others."""
    return {
        name: tensor.cpu() for name, part in whole_state(model).items() if (tensor := gather_tensor(part)) is not None
    }


def whole_tensor(tensor: Any) -> "torch.Tensor":
    """Return the full tensor of a DTensor (FSDP2), on each rank; any other tensor unchanged. Called by all ranks."""
    if not is_sharded(tensor):
        return tensor
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor()  # offloaded shards are on the CPU


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of processes: 0 and 1 without a process group."""
    import torch

    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def is_sharded(tensor: "torch.Tensor") -> bool:
    """Return whether a tensor of a model's state is sharded: FSDP2's DTensor or FSDP1's ShardedTensor."""
    return hasattr(tensor, "placements") or hasattr(tensor, "local_shards")


def own_part(tensor: Any) -> "torch.Tensor":
    """Return this rank's shard of a tensor of a model's state, or the tensor itself if it is not sharded."""
    import torch

    if hasattr(tensor, "local_shards"):  # FSDP1 gives a rank one shard, or none of a small tensor
        return next((shard.tensor for shard in tensor.local_shards()), torch.empty(0))
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def own_parts(tensors: list[Any]) -> list[Any]:
    """Return ``own_part`` of each tensor; either all of them are sharded or none is, which is found at the first."""
    return list(map(own_part, tensors)) if tensors and is_sharded(tensors[0]) else tensors


def own_start(tensor: Any) -> int:
    """Return the position in a whole tensor, flattened, of the first element of ``own_part``.

    FSDP1's flat shards have no such position.
    """
    if not hasattr(tensor, "placements"):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert not any(offsets[1:]), "FSDP2 shards the first dimension"
    return int(offsets[0]) * math.prod(tensor.shape[1:])


def unsharded_weights(model: "torch.nn.Module") -> "list[torch.nn.Parameter]":
    """Return the weights of FSDP2 units that are unsharded (all-gathered) at this moment."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return []
    return [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]


def own_shards(model: "torch.nn.Module") -> "list[torch.nn.Parameter] | None":
    """Return this rank's shards of the weights, even if a failed pass left layers unsharded.

    None if nothing is sharded. Reshards layers of FSDP2; the model must not be used afterwards.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    units = [module for module in model.modules() if isinstance(module, FSDPModule | FullyShardedDataParallel)]
    for unit in units:
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(True, recurse=False)  # else the root stays unsharded until the backward pass
            unit.reshard()
    if units and not isinstance(units[0], FSDPModule):
        # `parameters()` does not list the parameters of an unsharded unit.
        handles: list[Any] = [getattr(unit, "_handle", None) for unit in units]
        return [parameter for handle in handles if handle for parameter in handle.flat_param._params]
    return list(model.parameters()) if units else None


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add to it."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
