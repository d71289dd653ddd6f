"""Which configurations of a recipe fit a GPU, their limits, and which one to recommend."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from kit.config.optimisers import OPTIMISERS
from kit.memory.fit import CHECKPOINTING, MARGIN, choose
from kit.memory.formulas import Memory, predict
from kit.memory.workload import Workload, machines_with_copies
from kit.strategy.strategies import DDP, FSDP2, HYBRID, OFFLOAD, SINGLE
from kit.tools.plan.hardware import Gpu
from kit.tools.plan.speed import Step, step

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = get_args(Method)
# Configurations whose speeds differ by less are equally fast, as far as the formulas know.
EQUALLY_FAST = 0.05


@dataclass(frozen=True, kw_only=True)
class Option:
    """One configuration of a recipe on given GPUs."""

    workload: Workload
    gpu: Gpu
    memory: Memory
    step: Step | None  # None if the GPU's speed is not known

    @property
    def spare(self) -> int:
        """Bytes of a GPU that stay free after ``MARGIN``; below 0: the bytes that are missing."""
        return int((1 - MARGIN) * self.gpu.memory) - self.memory.peak

    @property
    def missing_host(self) -> float:
        """Bytes by which a machine's memory is too small; 0 if it is enough, or unknown."""
        return max(0.0, sum(self.memory.host.values()) - self.gpu.host)

    @property
    def fits(self) -> bool:
        """Whether a GPU's memory is enough, with ``MARGIN`` left free, and that of its machine."""
        return self.spare >= 0 and not self.missing_host


def try_out(workload: Workload, gpu: Gpu) -> Option:
    """Predict memory and time of ``workload`` on ``gpu``, with fp16 in place of bf16 on one that has none."""
    precision = "fp16" if workload.mixed_precision == "bf16" and not gpu.bf16 else workload.mixed_precision
    workload = replace(workload, mixed_precision=precision, device_memory=gpu.memory)
    return Option(workload=workload, gpu=gpu, memory=predict(workload), step=step(workload, gpu))


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
    """Return all configurations of ``base``: each method with each sensible strategy, in the order of ``METHODS``.

    Each has the settings that are best (see ``tuned``), with ``activation_offload``, then also ``tiled_mlp`` where it
    does not fit without; then the smallest sequence-parallel group that fits, unless ``base`` sets its size. One that
    never fits has those that take the least memory.

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
                tiled = replace(offloaded, tiled_mlp=True)
                best = tuned(way, gpu, global_batch_size) or tuned(offloaded, gpu, global_batch_size)
                if not base.shape.experts:
                    best = best or tuned(tiled, gpu, global_batch_size)
                for size in sequence_parallel_sizes(base)[1:] if base.sequence_parallel_size == 1 else ():
                    best = best or tuned(replace(offloaded, sequence_parallel_size=size), gpu, global_batch_size)
                smallest = offloaded if base.shape.experts else tiled
                found.append(best or try_out(least(smallest, global_batch_size), gpu))
    return found


def supports_sequence_parallelism(workload: Workload) -> bool:
    """Return whether all its models support sequence parallelism."""
    return not workload.eager and all(
        each.supports_sequence_parallelism for each in (workload.shape, workload.teacher) if each
    )


def sequence_parallel_sizes(workload: Workload) -> list[int]:
    """Return the possible sizes of a sequence-parallel group: 1, and the divisors of the heads of all models."""
    if not supports_sequence_parallelism(workload):
        return [1]
    most = min(workload.num_gpus, workload.gpus_per_machine)
    counts = [workload.num_gpus, *(each.num_heads for each in (workload.shape, workload.teacher) if each)]
    return [n for n in range(1, most + 1) if not any(count % n for count in counts)]


def longest_row(option: Option, size: int) -> int:
    """Return the tokens of the longest sequence that fits with ``size`` sequence-parallel GPUs and checkpointing.

    The other settings are those of ``option``.
    """
    own = replace(option.workload, sequence_parallel_size=size, rows=1, gradient_checkpointing=True)
    low, high = 0, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        fits = try_out(replace(own, length=middle), option.gpu).fits
        low, high = (middle, high) if fits else (low, middle)
    return low * own.sequences if own.packing else low


def least(workload: Workload, global_batch_size: int) -> Workload:
    """Return ``workload`` with the settings that take the least memory and change no maths."""
    share = max(1, global_batch_size // workload.num_data_ranks)
    return replace(workload, rows=1, micro_batches=share, gradient_checkpointing=True)


def recommend(found: list[Option], method: Method) -> Option | None:
    """Return the recommended one of ``options``; None if nothing fits.

    The method is kept if it fits in any way, since another one trains something else. Else the next smaller one that
    fits is taken, else a larger one; of the configurations that fit, the simplest of about the fastest ones.
    """
    order = [*METHODS[METHODS.index(method) :], *reversed(METHODS[: METHODS.index(method)])]
    for each in order:
        fitting = [option for option in found if option.workload.method == each and option.fits]
        if fitting:
            return best_of(fitting)
    return None


def best_of(options: list[Option]) -> Option:
    """Return the first of the options that are about the fastest; they stand with the simplest first."""
    enough = (1 - EQUALLY_FAST) * max(map(_speed, options))
    return next(option for option in options if _speed(option) >= enough)


def _speed(option: Option) -> float:
    """Tokens per second of a GPU, in the middle of the range; equal for all where nothing is known of the GPU."""
    return sum(option.step.tokens_per_second) / 2 if option.step else 0.0


def tuned(workload: Workload, gpu: Gpu, global_batch_size: int) -> Option | None:
    """Return ``workload`` with the micro-batch that ``choose`` finds best for each checkpointing; None if nothing fits.

    Of these the one that keeps the most is taken, unless another is clearly faster.
    """
    checkpointing = CHECKPOINTING if not workload.tiled_mlp else (True,)
    ways = (choose(workload, lambda way: try_out(way, gpu).fits, global_batch_size, how) for how in checkpointing)
    fitting = [try_out(way, gpu) for way in ways if way]
    return best_of(fitting) if fitting else None
