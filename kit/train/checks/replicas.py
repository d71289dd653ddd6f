"""Check that data-parallel replicas are bit-identical."""

from collections import Counter
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from kit.strategy.fsdp import own_shard
from kit.strategy.weights import own_part, replicated
from kit.system.errors import TrainingError, listed

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

_CHUNK = 1 << 22


def describe_check(prepared: "Prepared", every: int) -> list[str]:
    """Return a line that says what ``compare_replicas`` will compare every ``every`` steps; nothing if it is 0."""
    if not every:
        return []
    num, processes = len(replicated(prepared.accelerator, prepared.model)), prepared.strategy.num_processes
    if num and processes > 1:
        return [f"replicas: {num} tensors of {processes} processes are compared every {every} steps"]
    return ["warning: --check_replicas has nothing to compare: no weights are replicated"]


def compare_replicas(prepared: "Prepared", every: int, step: int) -> None:
    """Compare all weights, frozen ones too, and the gradients that the optimiser will use. Called by all ranks.

    Reads every weight once. Each process sends a number for each tensor. Shards without a copy are left out.

    Args:
        every: compare if ``step``, counted from 1, is a multiple of it; 0: never.

    Raises:
        TrainingError: on all ranks, if a copy differs; names the tensors and the ranks.
    """
    if not every or step % every:
        return
    held = {}  # by name and shard
    for name, parameter in replicated(prepared.accelerator, prepared.model).items():
        held[name, own_shard(parameter)] = parameter.detach()
        if parameter.grad is not None:
            held[f"gradient of {name}", own_shard(parameter)] = parameter.grad
    numbers = checksums([own_part(tensor) for tensor in held.values()])
    everyones = gather_object([dict(zip(held, numbers, strict=True))])
    drifted = []
    for name, (number, count) in held:
        values = {rank: of[name, (number, count)] for rank, of in enumerate(everyones) if (name, (number, count)) in of}
        usual = Counter(values.values()).most_common(1)[0][0]  # of two that are equally frequent, the first
        others = [str(rank) for rank, value in values.items() if value != usual]
        if others:
            drifted.append(f"{name}{f' (shard {number})' if count > 1 else ''} on rank {', '.join(others)}")
    everywhere = list(dict.fromkeys(each for of_rank in gather_object([drifted]) for each in of_rank))
    if everywhere:
        raise TrainingError(f"step {step}: replicas diverge: {listed(everywhere, 5)}")


def checksums(tensors: list[torch.Tensor]) -> list[int]:
    """Return for each tensor the sum of its bits, weighted by odd numbers, modulo 2^64. Equal bits, equal sums."""
    sums = []
    for tensor in tensors:
        bits = tensor.contiguous().reshape(-1).view(torch.uint8)
        wide = bits if bits.numel() % 4 or bits.storage_offset() % 4 else bits.view(torch.int32)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for start in range(0, wide.numel(), _CHUNK):  # in chunks, because the copy as int64 takes memory
            chunk = wide[start : start + _CHUNK].to(torch.int64)
            total += (chunk * torch.arange(2 * start + 1, 2 * (start + len(chunk)), 2, device=tensor.device)).sum()
        sums.append(total)
    return torch.stack(sums).tolist() if sums else []
