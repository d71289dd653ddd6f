"""What the ranks do together: the collectives of training at three sizes, and the gradient of a tiny model.

Every collective is checked for its values, and timed. All functions are called by all ranks.
"""

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed, nn

from kit.strategy.gradients import accumulating, clip_grad_norm
from kit.tools.doctor.result import Result, ok

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

SIZES = (1 << 12, 1 << 20, 1 << 25)  # bytes: latency, a bucket of a small model, and DDP's bucket of 25 MB
SLOW_SECONDS = 1.0  # of a size: larger ones would take minutes, and are left out
_REPEATS = 3  # of which the fastest counts: the first one opens connections
_WIDTH = 64
_TOLERANCE = {"no": 1e-3, "bf16": 0.05}  # of the gradient norm, relative


def _all_reduce(values: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, float]:
    result = values + rank
    distributed.all_reduce(result)
    return result, world * (world - 1) / 2


def _all_gather(values: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, float]:
    result = values.new_empty(len(values) // world * world)
    distributed.all_gather_into_tensor(result, values[: len(values) // world] + rank)
    return result.view(world, -1) - torch.arange(world, device=values.device)[:, None], 0.0


def _reduce_scatter(values: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, float]:
    result = values.new_empty(len(values) // world)
    distributed.reduce_scatter_tensor(result, values[: len(values) // world * world] + rank)
    return result, world * (world - 1) / 2


def _broadcast(values: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, float]:
    result = values + rank + 1
    distributed.broadcast(result, src=0)
    return result, 1.0


class Collective(NamedTuple):
    """A collective to check."""

    # Takes float32 zeros [n], the rank and the number of ranks. Returns the result, and the value that each of its
    # elements must have.
    run: Callable[[torch.Tensor, int, int], tuple[torch.Tensor, float]]
    # How often the n values pass the slowest link, by the number of ranks: the bus bandwidth of nccl-tests.
    passes: Callable[[int], float]


COLLECTIVES = {
    "all-reduce": Collective(_all_reduce, lambda world: 2 * (world - 1) / world),
    "all-gather": Collective(_all_gather, lambda world: (world - 1) / world),
    "reduce-scatter": Collective(_reduce_scatter, lambda world: (world - 1) / world),
    "broadcast": Collective(_broadcast, lambda world: 1.0),
}


def check_collective(
    name: str,
    device: torch.device,
    begin: Callable[[str], None],
    measured: dict[str, tuple[float, float]] | None = None,
) -> Result:
    """Run one collective at each of ``SIZES``, up to the first that is slow; fail if a value is wrong.

    Args:
        begin: called with what this rank begins to do.
        measured: gets the name of the collective, and the seconds of the smallest size, and the bytes a
            second of the largest.
    """
    collective = COLLECTIVES[name]
    rank, world = distributed.get_rank(), distributed.get_world_size()
    times = []  # seconds, of each size
    for num_bytes in SIZES:
        begin(f"in {name} of {_in_units(num_bytes)}")
        values = torch.zeros(num_bytes // 4, device=device)
        fastest = float("inf")
        for _ in range(_REPEATS):
            _synchronize(device)
            began = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the names of torch 2.13; 2.12 has no others
                result, expected = collective.run(values, rank, world)
            _synchronize(device)
            fastest = min(fastest, time.perf_counter() - began)
            is_slow = _slowest(fastest, device) > SLOW_SECONDS
            if is_slow:
                break
        if not bool((result == expected).all()):
            found = f"wrong values at {_in_units(num_bytes)}"
            return Result(name, "fail", found, "try NCCL_P2P_DISABLE=1, then another GPU, cable or driver")
        times.append(fastest)
        if is_slow:
            break
    rate = SIZES[len(times) - 1] * collective.passes(world) / times[-1]
    if measured is not None and rate:
        measured[name] = times[0], rate
    shown = ", ".join(f"{_in_units(size)} {1e3 * t:.2f} ms" for size, t in zip(SIZES, times, strict=False))
    shown += "" if len(times) == len(SIZES) else ", larger ones left out as slow"
    return ok(name, f"{shown}: {rate / 1e9:.2f} GB/s" if not 0 < rate < 1e7 else f"{shown}: {rate / 1e6:.2f} MB/s")


def _slowest(seconds: float, device: torch.device) -> float:
    """The most seconds of all ranks, so that all of them decide alike."""
    value = torch.tensor(seconds, device=device)
    distributed.all_reduce(value, distributed.ReduceOp.MAX)
    return float(value)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _in_units(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >> 20 else f"{num_bytes >> 10} KiB"


class Block(nn.Module):
    """A layer that FSDP shards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return torch.tanh(self.linear(values))


class TinyModel(nn.Module):
    """Two layers and a head; the same on every rank."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(Block(), Block())
            self.head = nn.Linear(_WIDTH, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.head(self.layers(values)).float().square().mean()


def samples(rank: int) -> torch.Tensor:
    """Return the samples of one rank, [8, width]; they differ from those of every other rank."""
    return torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(1 + rank))


def check_gradients(prepared: "Prepared", gather: Callable[[list[Any]], list[Any]]) -> Result:
    """Compare the gradient norm of each rank with that of one process that has the samples of all.

    Without synchronisation a rank has the norm of its own samples, which is larger than that of the mean.

    Args:
        prepared: a ``TinyModel`` under the strategy of the run.
        gather: returns a list of all ranks' items.
    """
    accelerator, model = prepared.accelerator, prepared.model
    with accumulating(accelerator, model, is_last=True):
        accelerator.backward(model(samples(accelerator.process_index).to(accelerator.device)))
    norms = gather([float(clip_grad_norm(accelerator, model, 0.0))])
    alone = TinyModel()
    alone(torch.cat([samples(rank) for rank in range(accelerator.num_processes)])).backward()
    squares = sum(float(p.grad.square().sum()) for p in alone.parameters() if p.grad is not None)
    expected, tolerance = squares**0.5, _TOLERANCE[prepared.strategy.mixed_precision]
    wrong = [rank for rank, norm in enumerate(norms) if not abs(norm - expected) <= tolerance * expected]
    found = f"norm {norms[0]:.4g} on all ranks, {expected:.4g} in one process"
    if not wrong:
        return ok("gradients", found)
    ranks = ", ".join(map(str, wrong))
    found = f"not those of all ranks' samples on rank {ranks}: norm {norms[wrong[0]]:.4g}, expected {expected:.4g}"
    return Result("gradients", "fail", found, "report it with this output: such a run would compute wrong gradients")
