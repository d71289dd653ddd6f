"""Check that the copies of the model on all processes are equal, bit for bit."""

from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from kit.errors import TrainingError
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

    Reads every weight once; each process sends two integers for each tensor. Shards that one process alone holds are
    left out.

    Raises:
        TrainingError: on all ranks, if a copy differs; names the tensors and the ranks.
    """
    tensors = {}
    for name, parameter in replicated(prepared.accelerator, prepared.model).items():
        tensors[name] = own_part(parameter.detach())
        if parameter.grad is not None:
            tensors[f"gradient of {name}"] = own_part(parameter.grad)
    all_sums = gather_object([dict(zip(tensors, checksums(list(tensors.values())), strict=True))])
    drifted = []
    for name in dict.fromkeys(name for sums in all_sums for name in sums):
        holders = [rank for rank, sums in enumerate(all_sums) if name in sums]
        if others := _minority([all_sums[rank][name] for rank in holders]):
            drifted.append(f"{name} on rank {', '.join(str(holders[i]) for i in others)}")
    if drifted:
        more = f" and {len(drifted) - 5} more tensors" if len(drifted) > 5 else ""
        raise TrainingError(f"step {step}: replicas have drifted apart: {'; '.join(drifted[:5])}{more}")


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


def _minority(values: list[object]) -> list[int]:
    """The positions of values that differ from the most frequent one. If two are equally frequent, the first counts."""
    majority = max(values, key=lambda value: (values.count(value), value == values[0]))
    return [i for i, value in enumerate(values) if value != majority]
