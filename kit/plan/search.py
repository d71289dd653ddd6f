"""Which ways to run a recipe fit a GPU, how far each could go, and which one to take."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kit.plan.hardware import Gpu
from kit.plan.memory import Memory, predict
from kit.plan.speed import Step, collective_seconds, step
from kit.plan.workload import Strategy, Workload

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = get_args(Method)
MOST_ROWS, MOST_LENGTH = 4096, 2**20
# Of a GPU's memory, that is left free where the micro-batch is as large as fits: so far the formulas may be wrong.
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
        """Bytes of a GPU that stay free; below 0: so many are missing."""
        return self.gpu.memory - self.memory.peak

    @property
    def fits(self) -> bool:
        """Whether a GPU's memory is enough."""
        return self.spare >= 0

    @property
    def largest_rows(self) -> int:
        """The largest micro-batch of that length that fits; 0: none."""
        return _largest(lambda rows: try_out(replace(self.workload, rows=rows), self.gpu).fits, MOST_ROWS)

    @property
    def largest_length(self) -> int:
        """The longest row that fits in such a micro-batch, in tokens, and that the model can read; 0: none."""
        most = min(self.workload.shape.max_positions or MOST_LENGTH, MOST_LENGTH)
        return _largest(lambda length: try_out(replace(self.workload, length=length), self.gpu).fits, most)

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


def options(base: Workload, gpu: Gpu, only: Strategy | None = None) -> list[Option]:
    """Return all ways to run ``base``: each method with each strategy that makes sense, in the order of ``METHODS``."""
    return [
        try_out(replace(base, method=method, strategy=strategy), gpu)
        for method in METHODS
        for strategy in strategies(base.num_gpus, method, base.optim)
        if only in (None, strategy)
    ]


def recommend(found: list[Option], method: Method, global_batch_size: int) -> tuple[Option, str] | None:
    """Return the way to take, and why; None if nothing fits.

    The method is kept if it fits in any way, since another one learns something else. Else the one that comes closest
    is taken. Of the ways that fit the fastest wins, and without known speeds the simplest.
    """
    order = [*METHODS[METHODS.index(method) :], *reversed(METHODS[: METHODS.index(method)])]
    for each in order:
        fitting = [best for o in found if o.workload.method == each and (best := tuned(o, global_batch_size))]
        if fitting:
            best = max(fitting, key=_speed)
            return best, _reason(best, method, [o for o in found if o.workload.method == each])
    return None


def _speed(option: Option) -> float:
    """Tokens per second of all GPUs, in the middle of the range; equal for all where nothing is known of the GPU."""
    simplest = 1.0 - 0.1 * get_args(Strategy).index(option.workload.strategy)
    return simplest if option.step is None else sum(option.step.tokens_per_second)


def tuned(
    option: Option, global_batch_size: int, checkpointing: bool | None = None, rows: int | None = None
) -> Option | None:
    """Return the same with checkpointing only if it must be, and with a larger micro-batch where there is room for it.

    Args:
        checkpointing: whether it must be on or off; None: as it is best.
        rows: what the micro-batch must be; None: as it is best.

    Returns None if nothing fits.
    """
    for on in (False, True) if checkpointing is None else (checkpointing,):
        workload = replace(option.workload, gradient_checkpointing=on)
        share = max(1, global_batch_size // workload.num_gpus)
        if rows is not None:
            fixed = try_out(replace(workload, rows=rows, micro_batches=max(1, share // rows)), option.gpu)
            if fixed.fits:
                return fixed
            continue
        largest = try_out(workload, option.gpu).largest_rows
        if not largest:
            continue
        enough = max(workload.rows, ENOUGH_TOKENS // workload.length)
        most = max(n for n in range(1, max(1, min(largest, enough, share)) + 1) if share % n == 0)
        if most < workload.rows <= largest and share % workload.rows == 0:
            most = workload.rows
        return try_out(replace(workload, rows=most, micro_batches=max(1, share // most)), option.gpu)
    return None


def _reason(best: Option, method: Method, same: list[Option]) -> str:
    own = best.workload
    parts = []
    if own.method != method:
        parts.append(f"{method} does not fit in any way")
    too_large = [o.workload.config for o in same if not tuned(o, own.rows * own.micro_batches * own.num_gpus)]
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


def fewest(base: Workload, gpu: Gpu, counts: list[int]) -> Option | None:
    """Return the simplest way to run ``base``, its method kept, on as few GPUs as possible; None if nothing fits."""
    for count in counts:
        share = max(1, base.rows * base.micro_batches * base.num_gpus // count // base.rows)
        workload = replace(base, num_gpus=count, micro_batches=share)
        for strategy in strategies(count, base.method, base.optim):
            option = try_out(replace(workload, strategy=strategy), gpu)
            if option.fits and strategy != "offload":
                return option
    return None


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
