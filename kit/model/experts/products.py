"""Matrix products of tokens that are sorted by expert, in fixed order: no atomic operations."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

_ALIGNMENT = 16  # bytes: ``grouped_mm`` takes rows that are a multiple of it


@dataclass
class Routes:
    """The S = N k pairs of a token and one of its experts, sorted by expert.

    Attributes:
        order: [S], which pair is in which place.
        inverse: [S], in which place which pair is.
        experts: [S], the expert of each place.
        ends: [E], int32, behind the last place of each expert.
        is_grouped: whether the products of all experts may be one kernel.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor
    is_grouped: bool

    @classmethod
    def of(cls, top_k_index: torch.Tensor, num_experts: int, is_grouped: bool) -> "Routes":
        """``top_k_index``: [N, k], the experts of each token."""
        experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        every = torch.arange(num_experts, device=order.device)
        ends = torch.searchsorted(experts, every, right=True).to(torch.int32)
        return cls(order, inverse, experts, ends, is_grouped)

    @cached_property
    def counts(self) -> list[int]:
        """The number of pairs of each expert. For it the host waits for the GPU."""
        return [end - start for start, end in pairwise([0, *self.ends.tolist()])]

    def runs(self, longest: int) -> Iterator[tuple[slice, slice]]:
        """Yield runs of at most ``longest`` consecutive experts that all have tokens, and the places of each run."""
        first = behind = 0
        for expert, count in enumerate([*self.counts, 0]):
            if first < expert and (not count or expert - first == longest):
                places = sum(self.counts[first:expert])
                yield slice(first, expert), slice(behind - places, behind)
                first = expert
            if not count:
                first = expert + 1
            behind += count


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        rows = dy[ctx.saved_tensors[0]]
        return rows.view(-1, ctx.k, rows.shape[-1]).sum(1), None, None, None


def take_rows(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Return the rows x[order // k] [S, h] of x [N, h]. ``order`` and ``inverse`` are permutations of S = N k."""
    return _Rows.apply(x, order, inverse, k)


def products(x: torch.Tensor, matrices: torch.Tensor, routes: Routes, experts: slice = slice(None)) -> torch.Tensor:
    """Return y [s, o] = x W_e.

    Args:
        x: [s, i], the rows of ``experts``.
        matrices: [e, i, o], of ``experts``.
        experts: consecutive ones; all of the layer if left out.
    """
    if routes.is_grouped and all(size * x.element_size() % _ALIGNMENT == 0 for size in matrices.shape[1:]):
        ends = routes.ends[experts]
        if experts.start:
            ends = ends - routes.ends[experts.start - 1]
        return torch.nn.functional.grouped_mm(x, matrices, offs=ends)
    parts = x.split(routes.counts[experts])
    return torch.cat([rows @ matrix for rows, matrix in zip(parts, matrices, strict=True)])


def is_grouped(device: torch.device) -> bool:
    """Return whether torch has grouped products on ``device``."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))
