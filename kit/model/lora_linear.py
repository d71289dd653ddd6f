"""A frozen linear layer and its adapter, computed by one function of autograd.

Promises: the results are those of peft up to rounding, y = W x + bias + s B A x. The adapter's part is added by the
matrix product that computes it, in place: where peft makes up to four tensors of y's size (a product, its multiple, a
sum, and of 4-bit layers a copy), here there is one. In the backward pass the same holds of the gradient of x. For the
backward pass x and A x are kept.

peft's modules stay, so names, saving, merging and export are peft's. Its own forward answers wherever the function does
not apply: with dropout, DoRA, a bias in the adapter, several active adapters or none, merged ones, other layers than
``Linear`` and ``Linear4bit``, and under FSDP1, which gathers A and B only while their own modules run.

With ``fp8`` the products with W are those of ``kit.model.fp8_linear``; those with A and B stay in bf16.
"""

from types import MethodType
from typing import Any

import torch
from peft.import_utils import is_bnb_4bit_available
from peft.tuners import lora

from kit.model.fp8_linear import input_gradient


class _LoraLinear(torch.autograd.Function):
    """y [..., o] from x [..., i], A [r, i] and B [o, r], which have one dtype; ``weight`` is that of ``base``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, base: Any, scale: float
    ) -> torch.Tensor:
        y = base(x)
        low = x.reshape(-1, x.shape[-1]) @ a.t()  # [N, r]
        y.view(-1, y.shape[-1]).addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(x, low, a, b, weight)
        ctx.scale = scale
        ctx.is_fp8 = getattr(base, "is_fp8", False)
        # Of 4 bits. Under FSDP2 ``base`` has just put them into a new object, in the place of ``weight``.
        ctx.tables = getattr(base.weight, "quant_state", None)
        return y

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> Any:
        x, low, a, b, weight = ctx.saved_tensors
        dy = arriving[0].reshape(-1, arriving[0].shape[-1])  # [N, o]
        dlow = dy @ b  # [N, r]
        dx = None
        if ctx.needs_input_grad[0]:
            if ctx.is_fp8 and dy.dtype == torch.bfloat16:
                dx = input_gradient(dy, weight)
            else:
                dx = dy @ _matrix(weight, ctx.tables).to(dy.dtype)
            dx = dx.addmm_(dlow, a, alpha=ctx.scale).view(x.shape)
        # beta=0: of the first argument only the shape counts.
        da = torch.addmm(a, dlow.t(), x.reshape(-1, x.shape[-1]), beta=0, alpha=ctx.scale)
        db = torch.addmm(b, dy.t(), low, beta=0, alpha=ctx.scale)
        return dx, da, db, None, None, None


def install_lora_linear(model: torch.nn.Module) -> None:
    """Let the function compute the frozen linear layers of an adapted model, wherever it applies as they are called."""
    bases: dict[type, type] = {lora.Linear: torch.nn.Linear}
    if is_bnb_4bit_available():
        from bitsandbytes.nn import Linear4bit

        bases[lora.Linear4bit] = Linear4bit
    for module in model.modules():
        base: Any = getattr(module, "base_layer", None)
        # Subclasses may compute something else.
        is_known = type(module) in bases and type(base) is bases[type(module)]
        if is_known and not any(parameter.requires_grad for parameter in base.parameters()):
            module.forward = MethodType(_forward, module)


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute y [..., o] from x [..., i]."""
    # The products in place are not reached by autocast. So all is cast here, which casts gradients back to float32.
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    if args or kwargs or not _applies(self, x.dtype == dtype):
        return type(self).forward(self, x, *args, **kwargs)
    adapter, base = self.active_adapters[0], self.base_layer
    a, b = self.lora_A[adapter].weight.to(dtype), self.lora_B[adapter].weight.to(dtype)
    return _LoraLinear.apply(x.to(dtype), a, b, base.weight, base, self.scaling[adapter])


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
        # A layer of 4 bits answers in the dtype of its input, whatever autocast says.
        and (is_cast or type(module.base_layer) is torch.nn.Linear)
    )


def _matrix(weight: torch.Tensor, tables: Any) -> torch.Tensor:
    """The matrix [o, i] of a frozen layer; one of 4 bits is made anew with its ``tables``."""
    if tables is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight, tables)
