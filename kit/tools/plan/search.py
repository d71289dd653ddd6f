"""Which ways to run a recipe fit a GPU, how far each could go, and which one to take."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kit.config.optimisers import OPTIMISERS
from kit.memory.fit import CHECKPOINTING, MARGIN, choose
from kit.memory.formulas import Memory, predict
from kit.memory.workload import Workload, machines_with_copies
from kit.strategy.strategies import DDP, FSDP2, HYBRID, OFFLOAD, SINGLE
from kit.tools.plan.hardware import Gpu
from kit.tools.plan.speed import Step, collective_seconds, step

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = get_args(Method)
MOST_ROWS, MOST_LENGTH, MOST_POWER = 4096, 2**20, 10
# Ways to run whose speeds differ by less are equally fast, as far as the formulas know.
EQUALLY_FAST = 0.05


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a recipe on given GPUs."""

    workload: Workload
    gpu: Gpu
    memory: Memory
    step: Step | None  # None if the GPU's speed is not known

    @property
    def spare(self) -> int:
        """Bytes of a GPU that stay free beside ``MARGIN``; below 0: the bytes that are missing."""
        return int((1 - MARGIN) * self.gpu.memory) - self.memory.peak

    @property
    def missing_host(self) -> float:
        """Bytes by which a machine's memory is too small; 0 if it is enough, or unknown."""
        return max(0.0, sum(self.memory.host.values()) - self.gpu.host)

    @property
    def fits(self) -> bool:
        """Whether a GPU's memory is enough, with ``MARGIN`` left free, and that of its machine."""
        return self.spare >= 0 and not self.missing_host

    @property
    def largest_rows(self) -> int:
        """The largest micro-batch of that length that fits; 0: none."""
        return _largest(lambda rows: try_out(replace(self.workload, rows=rows), self.gpu).fits, MOST_ROWS)

    @property
    def largest_length(self) -> int:
        """The longest row, in tokens, that fits with what takes the least memory, and that the model reads; 0: none."""
        own = self.workload
        most = min(own.shape.max_positions or MOST_LENGTH, MOST_LENGTH)
        way = least(own, own.rows * own.micro_batches * own.num_gpus)
        return _largest(lambda length: try_out(replace(way, length=length), self.gpu).fits, most)

    def other_checkpointing(self) -> "Option":
        """Return this option without gradient checkpointing instead of with it, or with it on every operation."""
        changed = replace(self.workload, gradient_checkpointing=not self.workload.gradient_checkpointing)
        return try_out(changed, self.gpu)


def try_out(workload: Workload, gpu: Gpu) -> Option:
    """Predict memory and time of ``workload`` on ``gpu``, in float32 on one without bf16."""
    workload = replace(workload, bf16=workload.bf16 and gpu.bf16, device_memory=gpu.memory)
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


def strategies(base: Workload) -> list[Workload]:
    """Return ``base`` with each strategy that makes sense on its GPUs, the simplest first."""
    one = replace(base, strategy=SINGLE, num_replicas=1)
    if base.num_gpus == 1:
        return [one]
    found = [replace(one, strategy=DDP)]
    if OPTIMISERS[base.optim].bitsandbytes:  # these optimisers cannot read sharded weights
        return found
    found.append(replace(one, strategy=FSDP2))
    machines = machines_with_copies(base.num_gpus, base.gpus_per_machine)
    if machines > 1:
        found.append(replace(one, strategy=HYBRID, num_replicas=machines))
    return found if base.method == "qlora" else [*found, replace(one, strategy=OFFLOAD)]


def options(base: Workload, gpu: Gpu, global_batch_size: int, only: str | None = None) -> list[Option]:
    """Return all ways to run ``base``: each method with each strategy that makes sense, in the order of ``METHODS``.

    Each has the settings that are best (see ``tuned``), with ``activation_offload`` where it does not fit without. One
    that never fits has those that take the least memory: gradient checkpointing, and micro-batches of one row.

    Args:
        only: the config of the strategy; None: all.
    """
    found = []
    for method in METHODS:
        if base.fp8 and method == "qlora":  # it is refused
            continue
        for way in strategies(base.with_method(method)):
            if only in (None, way.config):
                offloaded = replace(way, activation_offload=True)
                best = tuned(way, gpu, global_batch_size) or tuned(offloaded, gpu, global_batch_size)
                found.append(best or try_out(least(way, global_batch_size), gpu))
    return found


def in_bf16(
    base: Workload, gpu: Gpu, global_batch_size: int, found: Iterable[Option], only: str | None = None
) -> Option | None:
    """Return the best way of full fine-tuning with weights and moments in bf16, where none of ``found`` fits.

    None where one does, where ``base`` is that already or trains adapters, on a GPU without bf16, and if nothing fits.
    The other arguments are those of ``options``.
    """
    fits = any(option.fits for option in found if option.workload.method == "full")
    if base.method != "full" or base.pure_bf16 or fits or not gpu.bf16:
        return None
    ways = strategies(replace(base, optim="adamw_torch_fused").in_bf16())
    tried = (tuned(way, gpu, global_batch_size) for way in ways if only in (None, way.config))
    fitting = [option for option in tried if option]
    return _best(fitting) if fitting else None


def least(workload: Workload, global_batch_size: int) -> Workload:
    """Return ``workload`` with the settings that take the least memory and change no maths."""
    share = max(1, global_batch_size // workload.num_gpus)
    return replace(workload, rows=1, micro_batches=share, gradient_checkpointing=True)


def recommend(found: list[Option], method: Method) -> tuple[Option, str] | None:
    """Return the way to take of ``options``, and why; None if nothing fits.

    The method is kept if it fits in any way, since another one learns something else. Else the next smaller one that
    fits is taken, else a larger one. Of the ways that fit, the simplest of those that are about the fastest is taken.
    """
    order = [*METHODS[METHODS.index(method) :], *reversed(METHODS[: METHODS.index(method)])]
    for each in order:
        same = [o for o in found if o.workload.method == each]
        fitting = [option for option in same if option.fits]
        if fitting:
            best = _best(fitting)
            return best, _reason(best, method, same)
    return None


def _best(options: list[Option]) -> Option:
    """The first of the options that are about the fastest; they stand with the simplest first."""
    enough = (1 - EQUALLY_FAST) * max(map(_speed, options))
    return next(option for option in options if _speed(option) >= enough)


def _speed(option: Option) -> float:
    """Tokens per second of a GPU, in the middle of the range; equal for all where nothing is known of the GPU."""
    return sum(option.step.tokens_per_second) / 2 if option.step else 0.0


def tuned(workload: Workload, gpu: Gpu, global_batch_size: int) -> Option | None:
    """Return ``workload`` with the micro-batch that ``choose`` finds best for each checkpointing; None if nothing fits.

    Of these the one that keeps the most is taken, unless another is clearly faster.
    """
    ways = (choose(workload, lambda way: try_out(way, gpu).fits, global_batch_size, how) for how in CHECKPOINTING)
    fitting = [try_out(way, gpu) for way in ways if way]
    return _best(fitting) if fitting else None


def _reason(best: Option, method: Method, same: list[Option]) -> str:
    own = best.workload
    parts = []
    if own.method != method:
        parts.append(f"{method} does not fit in any way")
    too_large = [o.workload.config for o in same if not o.fits]
    if too_large:
        parts.append(f"{own.method} does not fit with {' or '.join(too_large)}")
    elif len(same) > 1:
        parts.append("no way that fits is clearly faster" if best.step else "the simplest way that fits")
    if own.strategy.replicates:
        parts.append(f"each machine holds a copy, sharded over its {own.num_shards} GPUs")
    if own.strategy.offloads:
        host = sum(best.memory.host.values()) / 2**30
        parts.append(f"weights and optimiser wait in {host:,.0f} GiB of host memory, which each machine must have")
    if own.gradient_checkpointing:
        needed = f"{'' if own.gradient_checkpointing is True else 'selective '}gradient checkpointing"
        parts.append(f"it needs {needed}{' and activation_offload' if own.activation_offload else ''}")
    else:
        parts.append("it fits without gradient checkpointing, which costs time")
    return "; ".join(parts)


def smallest(base: Workload, global_batch_size: int, machines: Iterable[tuple[Gpu, int]]) -> Option | None:
    """Return the best way to run ``base``, its method kept, on the first of ``machines`` that it fits; None if none.

    The best is the simplest of those that are about the fastest. Weights and optimiser are offloaded only where nothing
    else fits any of the machines. GPUs that do not divide the global batch are passed over.

    Args:
        machines: GPUs that someone may have, and their numbers.
    """
    found = [_fitting(replace(base, num_gpus=num), global_batch_size, gpu) for gpu, num in machines]
    for offloads in (False, True):
        for ways in found:
            own = [option for option in ways if option.workload.strategy.offloads == offloads]
            if own:
                return _best(own)
    return None


def fewest(base: Workload, global_batch_size: int, gpu: Gpu, most: int | None = None) -> Option:
    """Return the way to run ``base`` on as few GPUs as possible, of up to ``most``.

    One that does not fit is what comes closest, on as many GPUs as divide the global batch.
    """
    counts = [2**power for power in range(MOST_POWER) if most is None or 2**power < most]
    if most:
        counts.append(most)
    counts = [count for count in counts if global_batch_size % count == 0]
    best = smallest(base, global_batch_size, [(gpu, count) for count in counts])
    if best:
        return best
    ways = strategies(replace(base, num_gpus=counts[-1]))
    closest = (try_out(least(each, global_batch_size), gpu) for each in ways)
    return min(closest, key=lambda o: (max(0, -o.spare), o.missing_host, o.memory.peak))


def _fitting(base: Workload, global_batch_size: int, gpu: Gpu) -> list[Option]:
    """The ways in which ``base`` fits, its method and the number of its GPUs kept."""
    if global_batch_size % base.num_gpus:
        return []
    found = [tuned(way, gpu, global_batch_size) for way in strategies(base)]
    return [option for option in found if option]


@dataclass(frozen=True, kw_only=True)
class ScaledStep:
    """A step of one micro-batch, sharded over a number of GPUs."""

    num_gpus: int
    num_machines: int
    host: int  # bytes of the memory of one machine
    peak: int  # bytes of one GPU
    tokens_per_second: tuple[float, float]  # of one GPU
    sent_share: float  # seconds of the collectives, over those of the computation at its fastest; above 1 it waits
    group: int  # GPUs over which to shard, with copies between groups, for the shortest collectives
    group_sent_share: float  # the same share with it


def scaling(base: Workload, gpu: Gpu) -> list[ScaledStep]:
    """Return a sharded step of one micro-batch on each of 8 to 4,096 GPUs; empty if the GPU's speed is not known.

    The machines are those of ``base``; if it has one GPU, they have the usual number of GPUs.
    """
    rows = []
    per_machine = base.gpus_per_machine if base.num_gpus > 1 else Workload.gpus_per_machine
    for num in (2**power for power in range(3, 13)):
        workload = replace(
            base, strategy=FSDP2, num_gpus=num, num_replicas=1, micro_batches=1, gpus_per_machine=per_machine
        )
        option = try_out(workload, gpu)
        if option.step is None:
            return []
        alone = replace(option.step, sent=0.0).seconds[0]
        grouped = {group: _in_groups(workload, group) for group in _groups(num)}
        fitting = [group for group, way in grouped.items() if try_out(way, gpu).fits] or [num]
        seconds = {group: collective_seconds(grouped[group], gpu) for group in fitting}
        best = min(seconds, key=lambda group: (seconds[group], group))
        rows.append(
            ScaledStep(
                num_gpus=num,
                num_machines=workload.num_machines,
                host=sum(option.memory.host.values()),
                peak=option.memory.peak,
                tokens_per_second=option.step.tokens_per_second,
                sent_share=option.step.sent / alone,
                group=best,
                group_sent_share=seconds[best] / alone,
            )
        )
    return rows


def _groups(num: int) -> list[int]:
    """The powers of 2 that divide ``num``."""
    return [2**power for power in range(num.bit_length()) if num % 2**power == 0]


def _in_groups(workload: Workload, group: int) -> Workload:
    """The same workload, with a copy of the model in each group of ``group`` GPUs."""
    num_replicas = workload.num_gpus // group
    return replace(workload, strategy=HYBRID if num_replicas > 1 else FSDP2, num_replicas=num_replicas)
