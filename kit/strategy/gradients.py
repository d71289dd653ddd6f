"""The gradients of a model whose weights may be replicated or sharded: reduce, clip, count and drop them.

Promises: as ``kit.strategy.weights``, every function here works under all strategies.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from kit.strategy.topology import strategy_name
from kit.strategy.weights import own_parts

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def clip_grad_norm(
    model: "torch.nn.Module", trained: "list[torch.nn.Parameter]", max_norm: float, loss_scale: float = 1.0
) -> "torch.Tensor":
    """Divide the gradients by ``loss_scale`` and clip them to ``max_norm``, in place; 0: do not clip.

    Called by all ranks.

    Bit for bit torch's ``clip_grad_norm_``, except that norms of bf16 gradients are in float32. The host needs a dozen
    milliseconds for an operation on some hundred DTensors, and one for this rank's shards of them.

    Args:
        trained: all weights of ``model`` that the optimiser trains. To find them, the host would visit every module.
        loss_scale: by which the loss was multiplied; 1 under FSDP1.

    Returns:
        The global gradient norm before clipping, of the divided gradients, shape [].
    """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm or float("inf"))
    gradients: list[Any] = [p.grad for p in trained if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    with torch.no_grad():
        parts = own_parts(gradients)
        norms = torch.stack(torch._foreach_norm(parts, dtype=torch.float32))  # of each gradient
        for dim, placement in enumerate(getattr(gradients[0], "placements", ())):  # all have the same
            if placement.is_shard():
                squares = norms**2
                torch.distributed.all_reduce(squares, group=gradients[0].device_mesh.get_group(dim))
                norms = squares**0.5
        norm = torch.linalg.vector_norm(norms) / loss_scale
        if max_norm:
            torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale)
        elif loss_scale != 1.0:
            torch._foreach_mul_(parts, 1.0 / loss_scale)
    return norm


@contextmanager
def accumulating(accelerator: "Accelerator", model: "torch.nn.Module", is_last: bool) -> Iterator[None]:
    """Gradient accumulation: reduce gradients over the ranks in the ``with`` block only if necessary.

    It is necessary for the last micro-batch of a step, and for each one with ``sync_each_batch``. HSDP all-reduces
    over its replicas for the last one only.

    Args:
        is_last: whether this is the last micro-batch of the step.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)
    reduces = is_last or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")
    in_bf16 = getattr(model, "gradients_as_computed", False)  # to look for it anew takes a walk over the modules
    averages = in_bf16 and keeps_gradients(model)  # DDP's buckets have the dtype of the weights
    with nullcontext() if reduces and not averages else accelerator.no_sync(model):
        yield
    if in_bf16 and (averages or not is_last):
        hold_in_float32(model)
    if averages and is_last:
        _average(model)


def trains_in_bf16(model: "torch.nn.Module") -> bool:
    """Return whether the trained weights are in bf16, without float32 master weights."""
    import torch

    return next((p.dtype == torch.bfloat16 for p in model.parameters() if p.requires_grad), False)


def take_gradients_as_computed(model: Any) -> None:
    """Let the gradient of a trained bf16 weight have the dtype in which the backward pass computes it.

    ``model.gradients_as_computed`` says to ``accumulating`` that there are such weights.

    Some are computed in float32, for example those of gpt-oss's experts. torch rounds them to the dtype of the weight
    unless ``grad_dtype`` is None. If that were set with the first gradient in float32, the first micro-batch of a run
    would be rounded and later ones not: a resumed run would differ from an uninterrupted one.
    """
    model.gradients_as_computed = trains_in_bf16(model)
    if model.gradients_as_computed:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = None


def hold_in_float32(model: "torch.nn.Module") -> None:
    """Cast bf16 gradients to float32, so that gradient accumulation is in float32."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.float()


def _average(model: "torch.nn.Module") -> None:
    """Average the gradients over the ranks. Called by all ranks."""
    import torch

    for parameter in model.parameters():
        if parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad.div_(torch.distributed.get_world_size()))


def rebuild_ddp_buckets(
    accelerator: "Accelerator",
    trained: "list[torch.nn.Parameter]",
    loss: "Callable[[], torch.Tensor]",
    check: Callable[[], None],
) -> None:
    """Let DDP rebuild its gradient buckets now, before the first step, and put the gradients into them.

    DDP sorts the gradients into new buckets after its first backward pass. With three or more ranks the buckets
    determine the order of sums, and so the last bits of the gradients. Without this, the first step of a resumed run
    would round differently from the same step of an uninterrupted run; and where it accumulates gradients, it would
    hold them twice, in the buckets and outside. Called by all ranks. Does nothing under other strategies.

    Args:
        loss: calls the model and returns a loss that reaches the same parameters as a step's. It is multiplied by 0, so
            no weight changes.
        check: called when there are gradients. DDP itself ends with a traceback if one is missing.
    """
    if not _lie_in_buckets(accelerator, trained):
        return
    for _ in range(2):  # DDP rebuilds its buckets in the second forward pass
        value = loss()
        if value.requires_grad:
            accelerator.backward(value * 0.0)
        check()
        clear_gradients(accelerator, trained)


def clear_gradients(accelerator: "Accelerator", trained: "list[torch.nn.Parameter]") -> None:
    """Clear the gradients of the last step, those of ``trained`` weights.

    Under DDP they become zero in its buckets. If they were dropped, the next step would accumulate its gradients
    outside the buckets, which takes another 4 bytes per trainable parameter.
    """
    import torch

    if not _lie_in_buckets(accelerator, trained):
        for parameter in trained:
            parameter.grad = None
    elif gradients := [p.grad for p in trained if p.grad is not None]:
        torch._foreach_zero_(gradients)


def _lie_in_buckets(accelerator: "Accelerator", trained: "list[torch.nn.Parameter]") -> bool:
    """Whether the gradients are in DDP's buckets. Those of bf16 weights are not: they are held in float32."""
    import torch

    return strategy_name(accelerator) == "ddp" and trained[0].dtype != torch.bfloat16


def drop_gradients(model: "torch.nn.Module") -> None:
    """Drop all gradients, also those that FSDP2 has not reduced and would add to the next ones.

    torch's own ``reset_iter_state`` keeps gradients that were accumulated without a reduction.
    """
    from torch.distributed.fsdp import FSDPModule

    model.zero_grad(set_to_none=True)
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                if getattr(parameter, "_unsharded_param", None) is not None:
                    parameter._unsharded_param.grad = None
                if parameter.unsharded_accumulated_grad is not None:  # since torch 2.15 the gradient above
                    parameter.unsharded_accumulated_grad = None


def keeps_gradients(model: "torch.nn.Module") -> bool:
    """Return whether all gradients take memory all the time, as in DDP's buckets, even while ``grad`` is None."""
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(model, DistributedDataParallel)
