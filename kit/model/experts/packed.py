"""Fused experts in 4 bits (NF4, double quantisation), which bitsandbytes alone does not load.

Promises: of a layer's experts at most ``MAX_BYTES`` stand in plain weights at a time, or one expert. These are the
weights to which bitsandbytes dequantises the whole tensor, bit for bit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kit.model.experts.products import Routes, products

MAX_BYTES = 64 << 20
_BLOCK = 64  # weights that share a scale
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class PackedExperts(torch.nn.Module):
    """The 4-bit weights of a layer's experts, in the place of the parameter [E, out, in], or [E, in, out].

    As in ``Linear4bit``, ``weight`` holds the packed values, and ``quant_state`` the scales, which are not sharded.

    Attributes:
        shape: of the plain weights.
    """

    def __init__(self, weight: Any) -> None:
        """``weight``: bitsandbytes' ``Params4bit``. A model on meta may have plain weights here."""
        super().__init__()
        self.weight = weight
        self.quant_state: Any = getattr(weight, "quant_state", None)
        self.shape: torch.Size = weight.shape if self.quant_state is None else self.quant_state.shape

    def forward(self, x: torch.Tensor, routes: Routes, is_transposed: bool) -> torch.Tensor:
        """Return y [S, o] of x [S, i], whose rows are sorted by expert.

        Args:
            is_transposed: whether the plain weights are [E, in, out].
        """
        return _PackedProducts.apply(x, self.weight, self, routes, is_transposed)

    def compute(self, x: torch.Tensor, packed: torch.Tensor, routes: Routes, is_transposed: bool) -> torch.Tensor:
        """As ``forward``, without a graph. ``packed`` is ``weight``, or what an autograd function has kept of it."""
        rows, columns = self.shape[1:]
        plain = self.dequantiser(packed.detach().reshape(-1).view(torch.uint8), x.dtype)
        y = x.new_empty(len(x), columns if is_transposed else rows)
        for experts, places in routes.runs(max(1, MAX_BYTES // (rows * columns * x.element_size()))):
            # Without a name, which would hold them beside those of the next run.
            y[places] = products(
                x[places], plain(experts) if is_transposed else plain(experts).transpose(1, 2), routes, experts
            )
        return y

    def dequantiser(self, values: torch.Tensor, dtype: torch.dtype) -> Callable[[slice], torch.Tensor]:
        """Return a function that gives the plain weights of a slice of experts from the bytes of all."""
        from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

        state, size = self.quant_state, self.shape[1:].numel()  # of one expert
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset

        def plain(experts: slice) -> torch.Tensor:
            first, last = experts.start * size, experts.stop * size
            part = QuantState(
                scales[first // _BLOCK : last // _BLOCK],
                shape=torch.Size([last - first]),  # on a CPU any other needs rows of whole blocks
                code=state.code,
                blocksize=_BLOCK,
                quant_type=state.quant_type,
                dtype=state.dtype,
            )
            weights = dequantize_4bit(values[first // 2 : last // 2].unsqueeze(1), part)
            return weights.view(-1, *self.shape[1:]).to(dtype)

        return plain


class _PackedProducts(torch.autograd.Function):
    """It keeps the packed weights for the backward pass, which dequantises them again, and no x."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, experts: PackedExperts, routes: Routes, is_transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.arguments = experts, routes, is_transposed
        return experts.compute(x, packed, routes, is_transposed)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        experts, routes, is_transposed = ctx.arguments
        return experts.compute(dy.contiguous(), ctx.saved_tensors[0], routes, not is_transposed), None, None, None, None


def packable(module: Any) -> list[str]:
    """Return the names of the parameters of a module that are fused experts, and can be in 4 bits.

    They can in the families that have transformers' ``use_experts_implementation``, if an expert is whole blocks.
    """
    if not is_experts(module):
        return []
    return [
        name
        for name, weight in module.named_parameters(recurse=False)
        if name in _WEIGHTS and (_is_packed(weight) or (weight.dim() == 3 and weight[0].numel() % _BLOCK == 0))
    ]


def _is_packed(weight: Any) -> bool:
    return weight.dtype == torch.uint8 or getattr(weight, "quant_state", None) is not None


def is_experts(module: Any) -> bool:
    """Return whether a module has transformers' ``use_experts_implementation``, whose flags describe it."""
    return hasattr(module, "is_concatenated")


@contextmanager
def shown_as_parameters(model: torch.nn.Module) -> Iterator[None]:
    """In the ``with`` block, let ``model`` show packed experts as parameters of their shape, as peft looks for them."""
    packed = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, PackedExperts)
    ]
    for module, name, child in packed:
        shown = child.weight
        if shown.shape != child.shape:
            zero = torch.zeros((), dtype=shown.dtype, device=shown.device)
            shown = torch.nn.Parameter(zero.expand(child.shape), requires_grad=False)
        delattr(module, name)
        setattr(module, name, shown)
    try:
        yield
    finally:
        for module, name, child in packed:
            delattr(module, name)
            setattr(module, name, child)
