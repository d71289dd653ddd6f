"""Linear layers with trainable float32 weights under autocast, without a saved bf16 copy for the backward pass.

Autocast casts a weight to bf16 for each product, and autograd keeps the copy: 2 bytes a parameter of all layers, until
their backward pass. Here the backward pass casts the weight again. Layers that read one input share one cast of it.

Promises: outputs are those of ``torch.nn.Linear``, and so are gradients, but that the gradients of a shared input are
added up in bf16 instead of float32. Without autocast, and where sharding gives the layer its weight in bf16 already,
nothing changes.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

# Names of the layers of a module that read one input, as most families call them.
SHARED_INPUTS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class _CastLinear(torch.autograd.Function):
    """y [..., o] from x [..., i] in bf16, ``weight`` [o, i] in float32 and a bias [o] in bf16, or None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = arriving[0].reshape(-1, arriving[0].shape[-1])  # [N, o]
        dx = (dy @ weight.to(dy.dtype)).view(x.shape) if ctx.needs_input_grad[0] else None
        dw = (dy.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        return dx, dw, dy.sum(dim=0) if ctx.needs_input_grad[2] else None


def install_trained_linear(model: torch.nn.Module) -> None:
    """Let the function compute the trained linear layers of ``model``, but for its output head, which has its own."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    for module in model.modules():
        # Subclasses may compute something else.
        if type(module) is torch.nn.Linear and module is not head and module.weight.requires_grad:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def install_shared_casts(model: torch.nn.Module) -> None:
    """Let autocast cast the input of queries, keys and values once, and that of gate and up, where they are trained."""
    for module in model.modules():
        for names in SHARED_INPUTS:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is torch.nn.Linear and layer.weight.requires_grad for layer in layers):
                module.register_forward_pre_hook(_cast_input, with_kwargs=True)


def _cast_input(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast the hidden states, the first argument or the one of that name, as autocast would for each layer."""
    states = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(states, torch.Tensor) or states.dtype != torch.float32:
        return None
    kind = states.device.type
    if not torch.is_autocast_enabled(kind):
        return None
    states = states.to(torch.get_autocast_dtype(kind))
    return ((states, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": states})


def _forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    kind = x.device.type
    is_kept = torch.is_autocast_cache_enabled() and not torch.is_grad_enabled()  # while generating, for all tokens
    if not torch.is_autocast_enabled(kind) or self.weight.dtype != torch.float32 or is_kept:
        return F.linear(x, self.weight, self.bias)
    dtype = torch.get_autocast_dtype(kind)
    return _CastLinear.apply(x.to(dtype), self.weight, None if self.bias is None else self.bias.to(dtype))
