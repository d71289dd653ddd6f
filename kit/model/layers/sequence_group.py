"""The sequence-parallel group, and its all-to-alls from sequence to head sharding (``sequence_parallel``)."""

import math
from typing import Any

import torch


class SequenceGroup:
    """The N ranks of sequence parallelism. This one has the tokens of slice ``index``, from 0."""

    def __init__(self, group: Any, index: int, size: int) -> None:
        """``group``: of torch.distributed, with ``size`` processes, in the order of their parts."""
        self.group, self.index, self.size = group, index, size

    def whole_rows(self, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All-to-all from sequence to head sharding: of each of ``states``, [B, H, T / N, D], return [B, H / N, T, D].

        Heads whose number N does not divide, which may be those of keys and values, are repeated until it does.
        """
        by_process = []  # [B, N, H / N, T / N, D] each
        for each in states:
            num_heads = each.shape[1]
            repeated = each.repeat_interleave(math.lcm(num_heads, self.size) // num_heads, dim=1)
            by_process.append(repeated.unflatten(1, (self.size, -1)))
        mine = _Exchange.apply(torch.cat(by_process, dim=2).movedim(1, 0), self.group)  # [N, B, heads, T / N, D]
        rows = mine.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, heads, T, D]
        return rows.split([each.shape[2] for each in by_process], dim=1)

    def own_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """All-to-all from head to sequence sharding: of [B, T, H / N, D] return [B, T / N, H, D]."""
        by_process = attended.unflatten(1, (self.size, -1)).movedim(1, 0)  # [N, B, T / N, H / N, D]
        return _Exchange.apply(by_process, self.group).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """Sends part i of a tensor [N, ...] to process i, and returns what each process sent here."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        return _exchanged(arriving[0], ctx.group), None


def _exchanged(parts: torch.Tensor, group: Any) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=group)
    return received
