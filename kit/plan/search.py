"""Which ways to run a recipe fit a GPU, how far each could go, and which one to take."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kit.plan.hardware import Gpu
from kit.plan.memory import Memory, predict
from kit.plan.speed import Step, collective_seconds, step
from kit.plan.workload import Strategy, Workload

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = get_args(Method)
MOST_ROWS, MOST_LENGTH, MOST_POWER = 4096, 2**20, 10
# Of a GPU's memory, that a plan leaves free: so far the formulas may be wrong.
MARGIN = 0.05
# Of a micro-batch. Beyond this, larger products are hardly faster, and a longer step only takes more memory.
ENOUGH_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a recipe on given GPUs."""

    workload: Workload
    gpu: Gpu
    memory: Memory
    step: Step | None  # None if the GPU's speed is not known

    @property
    def spare(self) -> int:
        """Bytes of a GPU that stay free beside ``MARGIN``; below 0: so many are missing."""
        return int((1 - MARGIN) * self.gpu.memory) - self.memory.peak

    @property
    def fits(self) -> bool:
        """Whether a GPU's memory is enough, with ``MARGIN`` left free."""
        return self.spare >= 0

    @property
    def largest_rows(self) -> int:
        """The largest micro-batch of that length that fits; 0: none."""
        return _largest(lambda rows: try_out(replace(self.workload, rows=rows), self.gpu).fits, MOST_ROWS)

    @property
    def largest_length(self) -> int:
        """The longest row that fits as it takes the least, in tokens, and that the model can read; 0: none."""
        own = self.workload
        most = min(own.shape.max_positions or MOST_LENGTH, MOST_LENGTH)
        way = least(own, own.rows * own.micro_batches * own.num_gpus)
        return _largest(lambda length: try_out(replace(way, length=length), self.gpu).fits, most)

    def other_checkpointing(self) -> "Option":
        """The same with gradient checkpointing on instead of off, or off instead of on."""
        changed = replace(self.workload, gradient_checkpointing=not self.workload.gradient_checkpointing)
        return try_out(changed, self.gpu)


def try_out(workload: Workload, gpu: Gpu) -> Option:
    """Predict memory and time of ``workload`` on ``gpu``."""
    return Option(workload=workload, gpu=gpu, memory=predict(workload), step=step(workload, gpu))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 to ``most`` that fits, where smaller ones fit if it does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = min(2 * low or 1, (low + high) // 2) if high > most else (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def strategies(num_gpus: int, method: Method, optim: str) -> list[Strategy]:
    """Return the strategies that make sense, the simplest first."""
    if num_gpus == 1:
        return ["single"]
    if "8bit" in optim:  # these optimisers cannot read sharded weights
        return ["ddp"]
    return ["ddp", "fsdp2"] if method == "qlora" else ["ddp", "fsdp2", "offload"]


def options(base: Workload, gpu: Gpu, global_batch_size: int, only: Strategy | None = None) -> list[Option]:
    """Return all ways to run ``base``: each method with each strategy that makes sense, in the order of ``METHODS``.

    Each is as it is best: see ``tuned``. One that never fits is as it takes the least: with gradient checkpointing and
    micro-batches of one row.
    """
    found = []
    for method in METHODS:
        for strategy in strategies(base.num_gpus, method, base.optim):
            if only in (None, strategy):
                way = replace(base, method=method, strategy=strategy)
                found.append(tuned(way, gpu, global_batch_size) or try_out(least(way, global_batch_size), gpu))
    return found


def least(workload: Workload, global_batch_size: int) -> Workload:
    """Return the same with what takes the least memory and changes no maths."""
    share = max(1, global_batch_size // workload.num_gpus)
    return replace(workload, rows=1, micro_batches=share, gradient_checkpointing=True)


def recommend(found: list[Option], method: Method) -> tuple[Option, str] | None:
    """Return the way to take of ``options``, and why; None if nothing fits.

    The method is kept if it fits in any way, since another one learns something else. Else the one that comes closest
    is taken. Of the ways that fit the fastest wins, and without known speeds the simplest.
    """
    order = [*METHODS[METHODS.index(method) :], *reversed(METHODS[: METHODS.index(method)])]
    for each in order:
        same = [o for o in found if o.workload.method == each]
        if best := max((o for o in same if o.fits), key=_speed, default=None):
            return best, _reason(best, method, same)
    return None


def _speed(option: Option) -> float:
    """Tokens per second of all GPUs, in the middle of the range; equal for all where nothing is known of the GPU."""
    simplest = 1.0 - 0.1 * get_args(Strategy).index(option.workload.strategy)
    return simplest if option.step is None else sum(option.step.tokens_per_second)


def tuned(
    workload: Workload, gpu: Gpu, global_batch_size: int, checkpointing: bool | None = None, rows: int | None = None
) -> Option | None:
    """Return ``workload`` with checkpointing only if it must be, and as large a micro-batch as fits and is of use.

    Args:
        checkpointing: whether it must be on or off; None: as it is best.
        rows: what the micro-batch must be; None: as it is best.

    Returns None if nothing fits.
    """
    share = max(1, global_batch_size // workload.num_gpus)
    for on in (False, True) if checkpointing is None else (checkpointing,):
        way = replace(workload, gradient_checkpointing=on)
        if rows is not None:
            fixed = try_out(replace(way, rows=rows, micro_batches=max(1, share // rows)), gpu)
            if fixed.fits:
                return fixed
            continue
        enough = max(way.rows, ENOUGH_TOKENS // way.length)
        for most in (n for n in range(min(enough, share), 0, -1) if share % n == 0):
            option = try_out(replace(way, rows=most, micro_batches=share // most), gpu)
            if option.fits:
                return option
    return None


def _reason(best: Option, method: Method, same: list[Option]) -> str:
    own = best.workload
    parts = []
    if own.method != method:
        parts.append(f"{method} does not fit in any way")
    too_large = [o.workload.config for o in same if not o.fits]
    if too_large:
        parts.append(f"{own.method} does not fit with {' or '.join(too_large)}")
    elif len(same) > 1:
        parts.append("of the ways that fit the fastest" if best.step else "the simplest way that fits")
    if own.strategy == "offload":
        needed = sum(best.memory.host.values()) / 2**30
        parts.append(f"weights and optimiser wait in {needed:,.0f} GiB of host memory, which each machine must have")
    if own.gradient_checkpointing:
        parts.append("it needs gradient checkpointing")
    else:
        parts.append("it fits without gradient checkpointing, which costs time")
    return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """GPUs that someone may have."""

    gpu: Gpu
    num_gpus: int
    host: float = math.inf  # bytes of memory of one machine


def smallest(base: Workload, global_batch_size: int, machines: Iterable[Machines]) -> Option | None:
    """Return the fastest way to run ``base``, its method kept, on the first of ``machines`` that it fits; None if none.

    Weights and optimiser are offloaded only where nothing else fits any of them. GPUs that do not divide the global
    batch are passed over.
    """
    found = [ways for each in machines if (ways := _fitting(base, global_batch_size, each))]
    for offloads in (False, True):
        for ways in found:
            own = [o for o in ways if (o.workload.strategy == "offload") == offloads]
            if own:
                return max(own, key=_speed)
    return None


def fewest(base: Workload, global_batch_size: int, gpu: Gpu, most: int | None = None) -> Option:
    """Return the way to run ``base`` on as few GPUs as possible, of up to ``most``.

    One that does not fit is what comes closest, on as many GPUs as divide the global batch.
    """
    counts = [2**power for power in range(MOST_POWER) if most is None or 2**power < most] + ([most] if most else [])
    counts = [count for count in counts if global_batch_size % count == 0]
    if best := smallest(base, global_batch_size, [Machines(gpu=gpu, num_gpus=count) for count in counts]):
        return best
    way = replace(base, num_gpus=counts[-1])
    ways = (replace(way, strategy=each) for each in strategies(way.num_gpus, way.method, way.optim))
    return min((try_out(least(each, global_batch_size), gpu) for each in ways), key=lambda o: o.memory.peak)


def _fitting(base: Workload, global_batch_size: int, machines: Machines) -> list[Option]:
    """The ways in which the method of ``base`` fits ``machines``."""
    if global_batch_size % machines.num_gpus:
        return []
    ways = (
        tuned(replace(base, num_gpus=machines.num_gpus, strategy=strategy), machines.gpu, global_batch_size)
        for strategy in strategies(machines.num_gpus, base.method, base.optim)
    )
    return [o for o in ways if o and sum(o.memory.host.values()) <= machines.host]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What a number of GPUs does to a step of one micro-batch."""

    num_gpus: int
    peak: int  # bytes of one GPU
    tokens_per_second: tuple[float, float]  # of one GPU
    sent_share: float  # seconds of the collectives, over those of the computation at its fastest; above 1 it waits
    group: int  # GPUs over which to shard, with copies between groups, for the shortest collectives
    group_sent_share: float  # the same share with it


def scaling(base: Workload, gpu: Gpu) -> list[Scale]:
    """Return what 8 to 4,096 GPUs do to a sharded step of one micro-batch each."""
    rows = []
    for num in (2**power for power in range(3, 13)):
        workload = replace(base, strategy="fsdp2", num_gpus=num, micro_batches=1)
        option = try_out(workload, gpu)
        if option.step is None:
            return []
        alone = replace(option.step, sent=0.0).seconds[0]
        fitting = [group for group in _groups(num) if _fits_in_group(workload, gpu, group)] or [num]
        seconds = {group: collective_seconds(workload, gpu, group) for group in fitting}
        best = min(seconds, key=lambda group: (seconds[group], group))
        rows.append(
            Scale(
                num_gpus=num,
                peak=option.memory.peak,
                tokens_per_second=option.step.tokens_per_second,
                sent_share=option.step.sent / alone,
                group=best,
                group_sent_share=seconds[best] / alone,
            )
        )
    return rows


def _groups(num: int) -> list[int]:
    return [2**power for power in range(num.bit_length()) if num % 2**power == 0]


def _fits_in_group(workload: Workload, gpu: Gpu, group: int) -> bool:
    """Whether the shards fit where only ``group`` GPUs share them."""
    return try_out(replace(workload, num_gpus=group), gpu).fits
