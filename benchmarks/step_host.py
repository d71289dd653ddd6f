"""What the host does for clip, update and clear of a step: calls of torch, and milliseconds, for many small weights.

    python benchmarks/step_host.py

The weights are as many as LoRA has on an 8B model, 448, but of 16 x 16, so that the host's part counts. On a GPU a call
is one kernel launch or, of a call for all weights (``_foreach``, ``_fused``), one for some 30 to 100 of them.
"""

import sys
import time
from pathlib import Path

import torch
from torch.distributed import HashStore
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kit.strategy.gradients import clip_grad_norm
from kit.train.optim import AdamW

NUM_WEIGHTS, ROUNDS = 448, 25


class Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def measured(work):
    """Calls of ``work``, and the milliseconds of its fastest round."""
    work()
    with Calls() as calls:
        work()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return calls.number, min(times) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    print("| work | weights | calls | ms of the host, fastest of 25 |\n|---|---|---|---|")
    for is_sharded in (False, True):
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(NUM_WEIGHTS)))
        if is_sharded:
            fully_shard(model)
        weights = list(model.parameters())
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        gradients = [weight.grad for weight in weights]
        works = {"clip": lambda weights=weights: clip_grad_norm_(weights, 1e9)}
        for name, options in {
            "loop": {"foreach": False},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
        }.items():
            works[f"AdamW, {name}"] = torch.optim.AdamW(weights, **options).step
        if is_sharded:
            works["clip, the kit's"] = lambda model=model: clip_grad_norm(None, model, 1e9)
            works["AdamW, foreach, the kit's"] = AdamW(weights, foreach=True).step
            works["AdamW, fused, the kit's"] = AdamW(weights, fused=True).step
        else:
            works["zero, one by one"] = lambda model=model: model.zero_grad(set_to_none=False)
            works["zero, all at once"] = lambda gradients=gradients: torch._foreach_zero_(gradients)
        for name, work in works.items():
            calls, milliseconds = measured(work)
            print(f"| {name} | {'DTensors' if is_sharded else 'plain'} | {calls:,} | {milliseconds:.1f} |")


if __name__ == "__main__":
    main()
