"""Check that the copies of the model on all processes are equal, bit for bit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from kit.errors import TrainingError
from kit.strategy.weights import replicated

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

    Reads every weight once. What a process sends and is sent, a few integers for each tensor, does not grow with the
    number of processes: if the least and the greatest of all sums are equal, all are. Only if they are not, the sums of
    the tensors that the message names are gathered. Sharded tensors are left out, since they have no copies.

    Raises:
        TrainingError: on all ranks, if a copy differs; names the tensors and the ranks.
    """
    held: dict[str, torch.Tensor | None] = {}  # of each parameter, its weight and its gradient
    for name, parameter in replicated(prepared.accelerator, prepared.model).items():
        held |= {name: parameter.detach(), f"gradient of {name}": parameter.grad}
    present = [tensor for tensor in held.values() if tensor is not None]
    found = iter(checksums(present))
    sums = {name: None if tensor is None else next(found) for name, tensor in held.items()}
    differing = _differing(sums, prepared.accelerator.device)
    if not differing:
        return
    shown = differing[:_MOST_SHOWN]
    all_sums = gather_object([[sums[name] for name in shown]])  # [ranks, shown]
    drifted = [
        f"{name} on rank {', '.join(map(str, _minority(values)))}"
        for name, values in zip(shown, zip(*all_sums, strict=True), strict=True)
    ]
    more = f" and {len(differing) - len(shown)} more tensors" if len(differing) > len(shown) else ""
    raise TrainingError(f"step {step}: replicas have drifted apart: {'; '.join(drifted)}{more}")


def _differing(sums: dict[str, tuple[int, int] | None], device: torch.device) -> list[str]:
    """The names whose sums are not equal on all ranks: the same names on all ranks. None for no tensor."""
    rows = [(0, 0, 0) if each is None else (1, *each) for each in sums.values()]
    own = torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 3)
    # The complement reverses the order of integers, without an overflow: the least complement is of the greatest.
    ends = torch.stack([own, ~own])  # [2, names, 3]
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MIN)
    is_equal = (ends[0] == ~ends[1]).all(dim=-1).tolist()
    return [name for name, equal in zip(sums, is_equal, strict=True) if not equal]


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
    """The ranks whose value differs from the most frequent one. If two are equally frequent, rank 0's counts."""
    majority = max(values, key=lambda value: (values.count(value), value == values[0]))
    return [rank for rank, value in enumerate(values) if value != majority]
