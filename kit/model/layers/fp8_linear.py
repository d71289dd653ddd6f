"""FP8 (e4m3) matmuls in linear layers, for ``fp8``.

The output, x Wᵀ, and the gradient of the input, dy W, are matmuls in e4m3, summed in float32, with results in bf16.
Both factors are quantised for each matmul (dynamic scaling), with one scale per token of x or dy, and per row or column
of W. The gradient of W is a matmul in bf16: it sums over tokens, so in FP8 they would need one common scale.

Promises:

- The result of a token depends on no other token. So packs, micro-batches and any number of processes give the same
  gradients up to bf16 rounding.
- Scales are powers of two, so scaling itself rounds nothing, and nothing overflows. What is not finite stays so.
- Weights, their names and what is saved are those without ``fp8``; nothing more is kept for the backward pass.
- The output head, adapters, layers that select experts, and layers whose sizes torch's 8-bit products do not take stay
  in bf16. What is computed in float32 without ``fp8`` stays so.
"""

import re
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from kit.model.layers.attention import computed_dtype
from kit.system.errors import Problem

_MULTIPLE = 16  # of both sizes of a weight, for torch's 8-bit products
_SELECTS = re.compile(r"(^|\.)(gate|router|\w+_gate)$")  # of experts: another rounding could select another one
_EXPONENT = 0x7F800000  # the bits of a float32 that alone make a power of two, not above the number


class _Fp8Linear(torch.autograd.Function):
    """y [..., o] from x [..., i] in bf16, ``weight`` [o, i] in bf16 or float32, and a bias [o] in bf16, or None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        y = product(x.reshape(-1, x.shape[-1]), weight.to(x.dtype))
        if bias is not None:
            y.add_(bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = arriving[0].reshape(-1, arriving[0].shape[-1])  # [N, o]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dy, weight).view(*arriving[0].shape[:-1], weight.shape[1])
        if x is not None:
            dw = (dy.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        return dx, dw, dy.sum(dim=0) if ctx.needs_input_grad[2] else None


def input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return dy W, [N, i] in bf16, of dy [N, o] in bf16 and a weight [o, i], by 8-bit products."""
    return product(dy, weight.to(dy.dtype).t())


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left [N, k] times the transpose of right [m, k], both in bf16, by 8-bit products: [N, m] in bf16."""
    if not left.shape[0]:  # an expert without tokens
        return left @ right.t()
    left, left_scale = _rounded(left)
    right, right_scale = _rounded(right)
    # Fast sums keep about 14 bits, of factors that have 4.
    return torch._scaled_mm(left, right.t(), left_scale, right_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)


def _rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix [n, k] in bf16 to e4m3. Returns that, and the float32 scale [n, 1] that each row was divided by.

    The largest value of a row becomes one from 128 to 256; e4m3 ends at 448.
    """
    largest = matrix.abs().amax(dim=1, keepdim=True).float()
    power = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)  # infinite if a value is not finite
    scale = power.clamp_min(2.0**-100) / 128  # not less, for rows of zeros
    return (matrix * scale.reciprocal().to(matrix.dtype)).to(torch.float8_e4m3fn).contiguous(), scale


def install_fp8_linear(model: Any) -> None:
    """Let FP8 matmuls compute the layers of ``fp8_layers``. Call this when adapters are attached."""
    for _, module in fp8_layers(model)[0]:
        module.is_fp8 = True
        module.forward = MethodType(_forward, module)


def _forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    dtype = computed_dtype(x)
    if dtype != torch.bfloat16:
        return F.linear(x, self.weight, self.bias)
    return _Fp8Linear.apply(x.to(dtype), self.weight, None if self.bias is None else self.bias.to(dtype))


def fp8_layers(model: Any) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return the layers, each with its name, that 8-bit products can compute; and the names of those that stay in bf16.

    Args:
        model: with its adapters or without; it may be on meta. Adapters are in neither list.
    """
    head = set(model.get_output_embeddings().modules())  # with whatever peft put around it
    takes: list[tuple[str, Any]] = []
    stays: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or "lora_" in name:
            continue
        plain_name = name.removesuffix(".base_layer")
        fits = module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0
        # Subclasses may compute something else.
        if type(module) is torch.nn.Linear and fits and module not in head and not _SELECTS.search(plain_name):
            takes.append((plain_name, module))
        else:
            stays.append(plain_name)
    return takes, stays


def check_fp8(meta_model: Any) -> list[Problem]:
    """Return a problem if no layer of the model can have FP8 matmuls."""
    if fp8_layers(meta_model)[0]:
        return []
    found = f"{type(meta_model).__name__} has no linear layer whose sizes are multiples of {_MULTIPLE}"
    return [Problem("fp8", found, fix="--fp8 false")]


def describe_fp8(model: Any) -> str:
    """Return a line that says which layers have FP8 matmuls, and which kinds stay in bf16."""
    takes, stays = fp8_layers(model)
    kinds = sorted({name.rpartition(".")[2] for name in stays})
    return f"fp8: matmuls of {len(takes)} linear layers; in bf16: {', '.join(kinds)} ({len(stays)} layers)"
