"""The forward pass of fused experts in 4 bits, or with LoRA, for all families with ``use_experts_implementation``.

Both products of an expert e are y = x W_e + s dropout(x) A_e B_e, as in its own linear layers: B A is never computed.
The flags of ``use_experts_implementation`` say what a family adds (bias, a gate of its own, a norm).

Promises: up to rounding the results are those of transformers' ``grouped_mm`` with the weights W + s B A.
"""

from types import MethodType
from typing import Any

import torch

from kit.model.experts.mxfp4 import Mxfp4Experts
from kit.model.experts.packed import PackedExperts, is_experts, packable
from kit.model.experts.products import Routes, is_grouped, products, take_rows


def install_packed(model: torch.nn.Module, storage: torch.dtype) -> None:
    """Put a ``PackedExperts`` in the place of each parameter with experts that can be in 4 bits.

    Args:
        storage: the dtype of packed weights, for those in MXFP4, which are bytes.
    """
    module: Any
    for module in list(model.modules()):
        for name in packable(module):
            weight = getattr(module, name)
            delattr(module, name)
            packed = Mxfp4Experts(weight, storage) if weight.dtype == torch.uint8 else PackedExperts(weight)
            setattr(module, name, packed)
            module.forward = MethodType(_forward, module)


def install_expert_lora(model: torch.nn.Module, dropout: float) -> None:
    """Compute the experts of an adapted model that have LoRA; without them, do nothing.

    Args:
        dropout: on the input of all adapters. peft has none on parameters, and makes no adapters with it beside them.

    Raises:
        ValueError: there is dropout, and only peft can compute the experts.
    """
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(wrapper.base_layer) for wrapper in wrappers}
    for wrapper in wrappers:
        if is_experts(wrapper.get_base_layer()):
            if id(wrapper) not in inner:
                wrapper.forward = MethodType(_forward, wrapper)
        elif dropout:
            raise ValueError(f"lora_dropout, and the family computes {type(wrapper.get_base_layer()).__name__} itself")
    for module in model.modules() if wrappers and dropout else ():
        if isinstance(module, LoraLayer):
            module.lora_dropout["default"] = torch.nn.Dropout(dropout)


@torch.compiler.disable  # the sizes of products depend on the tokens
def _forward(self: Any, hidden_states: torch.Tensor, *routing: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    """Return the sum [N, h] of what each token's experts give, times their weights.

    Args:
        self: the experts module, or the outermost of peft's wrappers around it.
        hidden_states: [N, h].
        routing: the experts of each token and their weights, [N, k]. Families have several names for them.
    """
    top_k_index, top_k_weights = (*routing, *named.values())
    experts, adapters = _unwrapped(self)
    device = hidden_states.device
    autocasts = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocasts else hidden_states.dtype
    grouped = is_grouped(device) and experts.config._experts_implementation != "eager"
    routes = Routes.of(top_k_index, experts.down_proj.shape[0], grouped)
    # One name for what follows, so that each tensor is free once the next is there, if autograd keeps none of it.
    y = take_rows(hidden_states.to(dtype), routes.order, routes.inverse, top_k_index.shape[-1])
    if experts.has_gate:
        y = experts._apply_gate(_projected(y, experts, "gate_up_proj", adapters, routes))
    else:
        y = experts.act_fn(_projected(y, experts, "up_proj", adapters, routes))
    y = _projected(y.to(dtype), experts, "down_proj", adapters, routes)
    if experts.has_post_expert_norm:
        y = experts.post_expert_norm(y)
    y = take_rows(y, routes.inverse, routes.order).view(*top_k_index.shape, -1)
    return (y * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _unwrapped(module: Any) -> tuple[Any, dict[str, Any]]:
    """The experts module, and peft's wrappers around it by the parameter that each adapts."""
    adapters = {}
    while hasattr(module, "base_layer"):
        adapters[module.parameter_name] = module
        module = module.base_layer
    return module, adapters


def _projected(x: torch.Tensor, experts: Any, name: str, adapters: dict[str, Any], routes: Routes) -> torch.Tensor:
    """y [S, o] of x [S, i] by the weights, the adapter and the bias of one of the two products."""
    weight = getattr(experts, name)
    if isinstance(weight, PackedExperts):
        y = weight(x, routes, experts.is_transposed)
    else:
        matrices = weight.to(x.dtype)
        y = products(x, matrices if experts.is_transposed else matrices.transpose(1, 2), routes)
    if name in adapters and not (adapters[name].disable_adapters or adapters[name].merged):
        for adapter in adapters[name].active_adapters:
            y = y + _low_rank(x, adapters[name], adapter, routes)
    if experts.has_bias:
        y = y + getattr(experts, f"{name}_bias").to(x.dtype)[routes.experts]
    return y


def _low_rank(x: torch.Tensor, wrapper: Any, adapter: str, routes: Routes) -> torch.Tensor:
    """s dropout(x) A_e B_e [S, o] of x [S, i]. peft keeps A as [E r, i], and B as [o, r E]."""
    number = wrapper.num_experts
    a = wrapper.lora_A[adapter].weight.to(x.dtype).unflatten(0, (number, -1))
    b = wrapper.lora_B[adapter].weight.to(x.dtype).unflatten(1, (-1, number))
    low = products(wrapper.lora_dropout[adapter](x), a.transpose(1, 2), routes) * wrapper.scaling[adapter]
    return products(low, b.permute(2, 1, 0).contiguous(), routes)
