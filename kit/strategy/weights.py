"""Operations on a model whose weights may be replicated or sharded: clip, generate, gather.

Promises: every function here works under all strategies, so code outside ``kit.strategy`` need not know which one runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.strategy.topology import strategy_of

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def clip_grad_norm(accelerator: "Accelerator", model: "torch.nn.Module", max_norm: float) -> "torch.Tensor":
    """Clip the gradients in place to ``max_norm``; 0 only measures. Called by all ranks.

    Returns:
        The global gradient norm before clipping, shape [].
    """
    # FSDP1 requires exactly the list of all its parameters.
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
    assert norm is not None
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


@contextmanager
def generating(accelerator: "Accelerator", model: "torch.nn.Module") -> Iterator[Any]:
    """Yield the model's ``generate`` function. All ranks must call it the same number of times."""
    inner = accelerator.unwrap_model(model)
    strategy = strategy_of(accelerator)
    if strategy == "fsdp2":
        from torch.distributed.fsdp import register_fsdp_forward_method

        if "generate" not in vars(inner):
            register_fsdp_forward_method(inner, "generate")
        yield partial(inner.generate, synced_gpus=True)
        return
    # `generate` bypasses the wrapped forward, which enables autocast.
    with accelerator.autocast():
        if strategy == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
                yield partial(inner.generate, synced_gpus=True)
        else:
            yield inner.generate


def replicated(accelerator: "Accelerator", model: "torch.nn.Module") -> "dict[str, torch.nn.Parameter]":
    """Return the parameters of which every process holds a full copy, by their plain names."""
    from torch.distributed.tensor import DTensor

    if strategy_of(accelerator) in ("single", "fsdp1"):  # FSDP1's shards look like ordinary tensors
        return {}
    return {plain_name(name): p for name, p in model.named_parameters() if not isinstance(p, DTensor)}


def settle(accelerator: "Accelerator", model: "torch.nn.Module", inputs: "dict[str, Any]") -> None:
    """Let DDP rebuild its gradient buckets now, before the first step. Called by all ranks.

    DDP sorts the gradients into new buckets after its first backward pass. With three or more ranks the buckets
    determine the order of sums, and so the last bits of the gradients. Without this, the first step of a resumed run
    would round differently from the same step of an uninterrupted run. Does nothing under other strategies.

    Args:
        inputs: keyword arguments of the model. Their loss is multiplied by 0, so nothing is learned.
    """
    if strategy_of(accelerator) != "ddp" or accelerator.num_processes < 3:
        return
    for _ in range(2):
        accelerator.backward(model(**inputs).sum() * 0.0)
        model.zero_grad()


def gather_trainable(accelerator: "Accelerator", model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Gather the full trainable tensors, by plain names, in the main process's CPU memory. Called by all ranks.

    Of a model without adapters it gathers the frozen ones too, because ``final/`` needs them.

    Returns an empty dict on all other ranks.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # FSDP1 crashes if it is asked to move tensors to the CPU that are already there.
    on_cpu = any(p.device.type == "cpu" for p in model.parameters())
    to_cpu = not (on_cpu and strategy_of(accelerator) == "fsdp1")
    has_adapters = hasattr(accelerator.unwrap_model(model), "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=to_cpu, ignore_frozen_params=has_adapters)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    if not accelerator.is_main_process:
        return {}
    names = {plain_name(name) for name, _ in model.named_parameters()}
    return trainable_only(model, state) if has_adapters else {name: state[name] for name in state if name in names}


def trainable_only(model: "torch.nn.Module", state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``state`` that train, without quantisation tables and frozen tied weights."""
    trainable = {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in trainable}


def own_shards(model: "torch.nn.Module") -> "list[torch.nn.Parameter] | None":
    """Return this rank's shards of the weights, even if a failed pass left whole layers gathered.

    None if nothing is sharded. Reshards gathered layers of FSDP2; the model must not be used afterwards.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    units = [module for module in model.modules() if isinstance(module, FSDPModule | FullyShardedDataParallel)]
    for unit in units:
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(True, recurse=False)  # else the root stays gathered until the backward pass
            unit.reshard()
    if units and not isinstance(units[0], FSDPModule):
        # `parameters()` does not list the parameters of a gathered unit.
        handles: list[Any] = [handle for unit in units if (handle := getattr(unit, "_handle", None))]
        return [parameter for handle in handles for parameter in handle.flat_param._params]
    return list(model.parameters()) if units else None


def keeps_gradients(model: "torch.nn.Module") -> bool:
    """Return whether all gradients take memory all the time, as in DDP's buckets, even while ``grad`` is None."""
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(model, DistributedDataParallel)


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add to it."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
