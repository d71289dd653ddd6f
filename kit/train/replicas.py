"""Check that the copies of the model on all processes are equal, bit for bit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from kit.errors import TrainingError
from kit.strategy.fsdp import own_shard
from kit.strategy.weights import own_part, replicated

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared


class ReplicaCheck:
    """Compares the copies every ``every`` steps. All ranks call it in each step, when the gradients are final."""

    def __init__(self, prepared: "Prepared", every: int) -> None:
        """``every``: steps between two comparisons; 0: never compare."""
        self._prepared, self._every = prepared, every

    def notes(self) -> list[str]:
        """Lines for the user that say what will be compared; none if the check is off."""
        if not self._every:
            return []
        prepared = self._prepared
        num, processes = len(replicated(prepared.accelerator, prepared.model)), prepared.strategy.num_processes
        if num and processes > 1:
            return [f"replicas: {num} tensors of {processes} processes are compared every {self._every} steps"]
        return ["warning: --check_replicas has nothing to compare: no process has a copy of what another one has"]

    def __call__(self, step: int) -> None:
        """Compare if ``step``, counted from 1, is due. Raises ``TrainingError`` like ``compare_replicas``."""
        if self._every and step % self._every == 0:
            compare_replicas(self._prepared, step)


def compare_replicas(prepared: "Prepared", step: int) -> None:
    """Compare all weights, frozen ones too, and the gradients that the optimiser will use. Called by all ranks.

    Reads every weight once. What a process sends and is sent, a few integers for each tensor and each of its shards,
    does not grow with the number of copies: if the least and the greatest of all sums are equal, all are. Only if they
    are not, the sums of the tensors that the message names are gathered. Shards without a copy are left out.

    Raises:
        TrainingError: on all ranks, if a copy differs; names the tensors and the ranks.
    """
    parameters = replicated(prepared.accelerator, prepared.model)
    held: dict[str, torch.Tensor | None] = {}  # of each parameter, this rank's part of its weight and of its gradient
    for name, parameter in parameters.items():
        held |= {name: parameter.detach(), f"gradient of {name}": parameter.grad}
    found = iter(checksums([own_part(tensor) for tensor in held.values() if tensor is not None]))
    sums = {name: (0, 0, 0) if tensor is None else (1, *next(found)) for name, tensor in held.items()}
    shards = [shard for parameter in parameters.values() for shard in [own_shard(parameter)] * 2]
    differing = _differing(list(sums.values()), shards, prepared.accelerator.device)
    if not differing:
        return
    names, shown = list(sums), differing[:_MOST_SHOWN]
    own = [sums[names[i]] if shard == shards[i][0] else None for shard, i in shown]
    drifted = []
    for (shard, i), values in zip(shown, zip(*gather_object([own]), strict=True), strict=True):
        text = f"{names[i]} (shard {shard})" if shards[i][1] > 1 else names[i]
        holders = [rank for rank, value in enumerate(values) if value is not None]
        others = _minority([values[rank] for rank in holders])
        drifted.append(f"{text} on rank {', '.join(str(holders[other]) for other in others)}")
    more = f" and {len(differing) - len(shown)} more tensors" if len(differing) > len(shown) else ""
    raise TrainingError(f"step {step}: replicas have drifted apart: {'; '.join(drifted)}{more}")


def _differing(
    sums: list[tuple[int, ...]], shards: list[tuple[int, int]], device: torch.device
) -> list[tuple[int, int]]:
    """Shards, (number, index in ``sums``) each, whose sums are not equal on all ranks that hold them.

    The list is the same on all ranks.

    Args:
        sums: three integers for each tensor: 1, or 0 where this rank has no such tensor, and its sums.
        shards: of each tensor, which shard this rank holds, and how many there are.
    """
    most = torch.iinfo(torch.int64).max  # for shards that this rank does not hold
    width = max((number for _, number in shards), default=1)
    ends = torch.full((2, width, len(sums), 3), most, dtype=torch.int64)
    for i, (row, (shard, _)) in enumerate(zip(sums, shards, strict=True)):
        ends[0, shard, i] = torch.tensor(row, dtype=torch.int64)
        # The complement reverses the order of integers, without an overflow: the least one is of the greatest.
        ends[1, shard, i] = ~ends[0, shard, i]
    ends = ends.to(device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MIN)
    is_held = ends[0, :, :, 0] != most
    is_equal = (ends[0] == ~ends[1]).all(dim=-1)
    return [(shard, i) for i, shard in (is_held & ~is_equal).T.nonzero().tolist()]


def checksums(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return two 64-bit sums over the bits of each tensor, plain and weighted by position. Equal bits, equal sums."""
    sums = []
    for tensor in tensors:
        bits = tensor.contiguous().reshape(-1).view(torch.uint8)
        wide = bits if bits.numel() % 4 or bits.storage_offset() % 4 else bits.view(torch.int32)
        total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        for start in range(0, wide.numel(), _CHUNK):  # in chunks, because the copy as int64 takes memory
            chunk = wide[start : start + _CHUNK].to(torch.int64)
            weights = torch.arange(start + 1, start + 1 + len(chunk), device=tensor.device)
            total += torch.stack([chunk.sum(), (chunk * weights).sum()])
        sums.append(total)
    return [(int(plain), int(weighted)) for plain, weighted in torch.stack(sums).tolist()] if sums else []


_CHUNK = 1 << 22
_MOST_SHOWN = 5  # tensors in a message


def _minority(values: Sequence[object]) -> list[int]:
    """The positions of values that differ from the most frequent one. If two are equally frequent, the first counts."""
    majority = max(values, key=lambda value: (values.count(value), value == values[0]))
    return [i for i, value in enumerate(values) if value != majority]
