"""A model's weights across ranks: whole, sharded or copied; what a strategy needs to clip, generate and gather.

Promises: nothing outside ``kit.strategy`` asks which strategy it is; every function here works under all of them.
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
    """Clip in place to ``max_norm`` (0: measure only). Returns the global norm before clipping, shape []."""
    # FSDP1 recognises its own parameters only when given exactly these.
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
    assert norm is not None
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


@contextmanager
def generating(accelerator: "Accelerator", model: "torch.nn.Module") -> Iterator[Any]:
    """Yield ``generate`` of the model, usable under every strategy; all ranks must call it equally often."""
    inner = accelerator.unwrap_model(model)
    strategy = strategy_of(accelerator)
    if strategy == "fsdp2":
        from torch.distributed.fsdp import register_fsdp_forward_method

        if "generate" not in vars(inner):
            register_fsdp_forward_method(inner, "generate")
        yield partial(inner.generate, synced_gpus=True)
        return
    # `generate` goes past the wrapped forward, and so past its autocast.
    with accelerator.autocast():
        if strategy == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
                yield partial(inner.generate, synced_gpus=True)
        else:
            yield inner.generate


def replicated(accelerator: "Accelerator", model: "torch.nn.Module") -> "dict[str, torch.nn.Parameter]":
    """The parameters of which every process holds a whole copy, by their plain names."""
    from torch.distributed.tensor import DTensor

    if strategy_of(accelerator) in ("single", "fsdp1"):  # FSDP1's are pieces that look like tensors
        return {}
    return {plain_name(name): p for name, p in model.named_parameters() if not isinstance(p, DTensor)}


def settle(accelerator: "Accelerator", model: "torch.nn.Module", inputs: "dict[str, Any]") -> None:
    """Bring about now what a strategy would arrange during its first steps. Called by all ranks.

    After its first backward pass DDP sorts the gradients into other buckets. On three and more ranks the order of sums,
    and with it their last bits, follows from the buckets: a resumed run would begin with others than it had.
    """
    if strategy_of(accelerator) != "ddp" or accelerator.num_processes < 3:
        return
    for _ in range(2):
        accelerator.backward(model(**inputs).sum() * 0.0)
        model.zero_grad()


def gather_trainable(accelerator: "Accelerator", model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Whole trainable tensors by their plain names, in CPU memory of the main process; empty on the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # FSDP1 crashes when told to move to CPU memory what is there already.
    on_cpu = any(p.device.type == "cpu" for p in model.parameters())
    to_cpu = not (on_cpu and strategy_of(accelerator) == "fsdp1")
    options = StateDictOptions(full_state_dict=True, cpu_offload=to_cpu, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    return trainable_only(model, state) if accelerator.is_main_process else {}


def trainable_only(model: "torch.nn.Module", state: dict[str, Any]) -> dict[str, Any]:
    """``state`` without what does not train: quantisation tables, and frozen tied weights."""
    trainable = {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in trainable}


def own_shards(model: "torch.nn.Module") -> "list[torch.nn.Parameter] | None":
    """What this rank keeps of sharded weights, even if a pass ended midway with whole layers gathered.

    None where nothing is sharded. Whole layers of FSDP2 are let go; the model is not to be used afterwards.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    units = [module for module in model.modules() if isinstance(module, FSDPModule | FullyShardedDataParallel)]
    for unit in units:
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(True, recurse=False)  # the root would stay whole until the backward
            unit.reshard()
    if units and not isinstance(units[0], FSDPModule):
        # A unit that is gathered hides its parameters from `parameters()`.
        handles: list[Any] = [handle for unit in units if (handle := getattr(unit, "_handle", None))]
        return [parameter for handle in handles for parameter in handle.flat_param._params]
    return list(model.parameters()) if units else None


def keeps_gradients(model: "torch.nn.Module") -> bool:
    """Whether gradients have their memory from the start, also while ``grad`` is None: in DDP's buckets."""
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(model, DistributedDataParallel)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put in front or between."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
