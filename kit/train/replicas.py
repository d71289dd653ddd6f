"""Check that the copies of the model on all processes are equal, bit for bit."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from kit.errors import TrainingError
from kit.strategy.fsdp import own_shard
from kit.strategy.weights import own_part, replicated

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

Shard = tuple[int, int]  # which one it is, and how many there are
_CHUNK = 1 << 22
_MOST_SHOWN = 5  # tensors in a message


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

    Reads every weight once. Each process sends two numbers for each tensor. Shards without a copy are left out.

    Raises:
        TrainingError: on all ranks, if a copy differs; names the tensors and the ranks.
    """
    held: dict[str, tuple[Shard, torch.Tensor | None]] = {}  # this rank's parts of weights and of their gradients
    for name, parameter in replicated(prepared.accelerator, prepared.model).items():
        shard = own_shard(parameter)
        held |= {name: (shard, parameter.detach()), f"gradient of {name}": (shard, parameter.grad)}
    found = iter(checksums([own_part(tensor) for _, tensor in held.values() if tensor is not None]))
    sums = {(name, shard): (0,) if tensor is None else next(found) for name, (shard, tensor) in held.items()}
    differing = _differing(gather_object([sums]))
    if not differing:
        return
    drifted = []
    for (name, (number, count)), values in list(differing.items())[:_MOST_SHOWN]:
        majority = Counter(values.values()).most_common(1)[0][0]  # of two that are equally frequent, the first
        others = ", ".join(str(rank) for rank, value in values.items() if value != majority)
        drifted.append(f"{name}{f' (shard {number})' if count > 1 else ''} on rank {others}")
    more = f" and {len(differing) - len(drifted)} more tensors" if len(differing) > len(drifted) else ""
    raise TrainingError(f"step {step}: replicas have drifted apart: {'; '.join(drifted)}{more}")


def _differing(everyones: list[dict[Any, Any]]) -> dict[Any, dict[int, Any]]:
    """The keys whose values are not equal on all ranks that have them, with the value of each of these ranks."""
    keys = dict.fromkeys(key for one in everyones for key in one)
    by_key = {key: {rank: one[key] for rank, one in enumerate(everyones) if key in one} for key in keys}
    return {key: values for key, values in by_key.items() if len(set(values.values())) > 1}


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
