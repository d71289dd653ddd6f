"""Fused LoRA: a frozen linear layer and its adapter, computed by one autograd function.

Promises: the results are those of peft up to rounding, y = W x + bias + s B A x. The adapter's part is added by the
matrix product that computes it, in place: where peft makes up to four tensors of y's size (a product, its multiple, a
sum, and of 4-bit layers a copy), here there is one. In the backward pass the same holds of the gradient of x. For the
backward pass x and A x are kept. Layers that read one input, as queries, keys and values do, are computed together.

peft's modules stay, so names, saving, merging and export are peft's. Its own forward is used wherever the function does
not apply: with dropout, DoRA, a bias in the adapter, several active adapters or none, merged ones, other layers than
``Linear`` and ``Linear4bit``, and under FSDP1, which gathers A and B only while their own modules run.

With ``fp8`` the products with W are those of ``kit.model.layers.fp8_linear``; those with A and B stay in bf16.
"""

from types import MethodType
from typing import Any

import torch
from peft.import_utils import is_bnb_4bit_available
from peft.tuners import lora

from kit.model.layers.fp8_linear import input_gradient
from kit.model.layers.trained_linear import SHARED_INPUTS


def _add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    """Add ``scale * left @ right`` to ``sums`` in place.

    An operation of its own, because the compiler would turn ``addmm_`` into a product into a new tensor, before which
    cuBLAS copies the sums.
    """
    sums.addmm_(left, right, alpha=scale)


_READY = "lora_outputs"  # attribute of an input: outputs that were computed of it, by the layer that will take its own

# A custom_op of torch would take 25 us of the host for each call, this takes a few.
_library = torch.library.Library("kit", "FRAGMENT")
if not hasattr(torch.ops.kit, "add_product_"):  # else this module is loaded again
    _library.define("add_product_(Tensor(a!) sums, Tensor left, Tensor right, float scale) -> ()")
    _library.impl("add_product_", _add_product, "CompositeExplicitAutograd")
    torch.library.register_fake("kit::add_product_", lambda *_: None, lib=_library)


class _LoraLinears(torch.autograd.Function):
    """y_i [..., o_i] of each of n layers from x [..., k], A_i [r_i, k] and B_i [o_i, r_i], which have one dtype.

    Layers that read one input are computed together: one product gives A x of all, one their gradients of A, and the
    gradient of x is one sum.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, bases: list[Any], *factors: torch.Tensor) -> Any:
        """``factors``: the weights of the n bases, then all A in one [sum of r, k], then each B."""
        n = len(bases)
        weights, a, b = factors[:n], factors[n], factors[n + 1 :]
        low = x.reshape(-1, x.shape[-1]) @ a.t()  # [N, sum of r]
        outputs = []
        for base, matrix, part in zip(bases, b, low.split([each.shape[1] for each in b], dim=1), strict=True):
            y = base(x)
            torch.ops.kit.add_product_(y.view(-1, y.shape[-1]), part, matrix.t(), scale)
            outputs.append(y)
        ctx.save_for_backward(x, low, a, *b, *weights)
        ctx.scale = scale
        ctx.is_fp8 = [getattr(base, "is_fp8", False) for base in bases]
        # Of 4 bits. Under FSDP2 ``base`` has just put them into a new object that replaces ``weight``.
        ctx.tables = [getattr(base.weight, "quant_state", None) for base in bases]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> Any:
        x, low, a, *others = ctx.saved_tensors
        n = len(arriving)
        b, weights = others[:n], others[n:]
        dys = [each.reshape(-1, each.shape[-1]) for each in arriving]  # [N, o]
        ranks = [each.shape[1] for each in b]
        dlow = torch.cat([dy @ matrix for dy, matrix in zip(dys, b, strict=True)], dim=1)  # [N, sum of r]
        dx: Any = None
        if ctx.needs_input_grad[0]:
            for dy, weight, tables, is_fp8 in zip(dys, weights, ctx.tables, ctx.is_fp8, strict=True):
                if is_fp8 and dy.dtype == torch.bfloat16:
                    part = input_gradient(dy, weight)
                    dx = part if dx is None else dx.add_(part)
                elif dx is None:
                    dx = dy @ _matrix(weight, tables).to(dy.dtype)
                else:
                    torch.ops.kit.add_product_(dx, dy, _matrix(weight, tables).to(dy.dtype), 1.0)
            torch.ops.kit.add_product_(dx, dlow, a, ctx.scale)
            dx = dx.view(x.shape)
        # beta=0: of the first argument only the shape counts.
        da = torch.addmm(a, dlow.t(), x.reshape(-1, x.shape[-1]), beta=0, alpha=ctx.scale)
        lows = low.split(ranks, dim=1)
        db = [
            torch.addmm(matrix, dy.t(), part, beta=0, alpha=ctx.scale)
            for matrix, dy, part in zip(b, dys, lows, strict=True)
        ]
        return dx, None, None, *[None] * n, da, *db


def install_lora_linear(model: torch.nn.Module) -> None:
    """Let the function compute the frozen linear layers of an adapted model, wherever it applies as they are called."""
    bases: dict[type, type] = {lora.Linear: torch.nn.Linear}
    if is_bnb_4bit_available():
        from bitsandbytes.nn import Linear4bit

        bases[lora.Linear4bit] = Linear4bit

    def is_known(module: Any) -> bool:
        base: Any = getattr(module, "base_layer", None)
        # Subclasses may compute something else.
        is_plain = type(module) in bases and type(base) is bases[type(module)]
        return is_plain and not any(parameter.requires_grad for parameter in base.parameters())

    for module in model.modules():
        if is_known(module):
            module.forward = MethodType(_forward, module)
        # What such a layer gives its parts is a tensor of its own. Of its own input the compiler lets nothing be kept.
        for part in module.modules() if hasattr(module, "input_layernorm") else ():
            for names in SHARED_INPUTS:
                layers: list[Any] = [getattr(part, name, None) for name in names]
                if all(map(is_known, layers)):
                    layers[0].read_too = layers[1:]


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute y [..., o] from x [..., i].

    The first of the layers that read one input computes the outputs of all. The others find theirs at the input.
    """
    ready: dict[Any, torch.Tensor] = getattr(x, _READY, {})
    if self in ready:
        return ready.pop(self)
    # The products in place are not reached by autocast. So all is cast here, which casts gradients back to float32.
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    if args or kwargs or not _applies(self, x.dtype == dtype):
        return type(self).forward(self, x, *args, **kwargs)
    others = [each for each in getattr(self, "read_too", ()) if _applies(each, x.dtype == dtype)]
    others = [each for each in others if _scale(each) == _scale(self)]
    y, *outputs = _outputs([self, *others], x, dtype)
    if others:
        setattr(x, _READY, dict(zip(others, outputs, strict=True)))
    return y


def _outputs(layers: list[Any], x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """y [..., o] in ``dtype`` of each of the layers, which have one scale, from x [..., k]."""
    bases = [layer.base_layer for layer in layers]
    a, b = (
        [getattr(layer, name)[layer.active_adapters[0]].weight for layer in layers] for name in ("lora_A", "lora_B")
    )
    if a[0].dtype == dtype:
        stacked = torch.cat(a)
    else:  # one cast of all, and one of all their gradients: each alone is so small that a GPU waits for the host
        values = torch.cat([each.flatten() for each in (*a, *b)]).to(dtype)
        rows, *parts = values.split([sum(each.numel() for each in a), *(each.numel() for each in b)])
        stacked = rows.view(-1, x.shape[-1])
        b = [part.view_as(each) for part, each in zip(parts, b, strict=True)]
    return _LoraLinears.apply(x.to(dtype), _scale(layers[0]), bases, *(base.weight for base in bases), stacked, *b)


def _scale(layer: Any) -> float:
    return layer.scaling[layer.active_adapters[0]]


def _applies(module: Any, is_cast: bool) -> bool:
    """Whether the function computes what peft's ``module`` would.

    Args:
        is_cast: whether the input has the dtype of the computation already.
    """
    if module.disable_adapters or module.merged or len(module.active_adapters) != 1:
        return False
    adapter = module.active_adapters[0]
    if adapter not in module.lora_A or adapter in module.lora_variant:
        return False
    a, b = module.lora_A[adapter], module.lora_B[adapter]
    return (
        {type(a), type(b)} == {torch.nn.Linear}  # FSDP1 wraps them
        and b.bias is None
        and isinstance(module.lora_dropout[adapter], torch.nn.Identity)
        # A 4-bit layer returns the dtype of its input, whatever autocast says.
        and (is_cast or type(module.base_layer) is torch.nn.Linear)
    )


def _matrix(weight: torch.Tensor, tables: Any) -> torch.Tensor:
    """The matrix [o, i] of a frozen layer; one of 4 bits is made anew with its ``tables``."""
    if tables is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight, tables)
