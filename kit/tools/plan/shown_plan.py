"""A plan as lines: the table of configurations, the recommended one, and all recipes at a glance."""

import shlex
from collections.abc import Iterable

from kit.config.commands import command_of
from kit.config.recipe import Recipe
from kit.memory.activations import offloaded
from kit.memory.fit import MARGIN, checkpointing_word
from kit.memory.formulas import Memory
from kit.memory.operations import forward_operations_per_token, operations_per_token
from kit.memory.workload import Workload
from kit.tools.plan.lengths import Lengths
from kit.tools.plan.request import PlanRequest
from kit.tools.plan.search import Option, longest_row, sequence_parallel_sizes
from kit.tools.plan.speed import writing_seconds
from kit.tools.text_table import text_table
from kit.tools.typed import typed

GIB = 2**30


def gib(num_bytes: float) -> str:
    """Return bytes as a string: ``17.6 GiB``."""
    return f"{num_bytes / GIB:,.1f} GiB"


def configurations(found: list[Option]) -> list[str]:
    """A table with a line for each configuration, as ``options`` returns them."""
    rows = []
    for option in found:
        own = option.workload
        rows.append(
            {
                "method": own.method,
                "config": own.config,
                "fits": "yes" if option.fits else "no" if option.spare < 0 else "no, host",
                "peak GiB": f"{option.memory.peak / GIB:,.1f}",
                "free GiB": f"{option.spare / GIB:,.1f}",
                "micro-batch": own.rows,
                "checkpointing": "+".join(_saving(own)),
                "compiled": "yes" if own.fuses else "no",
                "tokens/s per GPU": _range(option.step.tokens_per_second) if option.step else "-",
                "host GiB": f"{sum(option.memory.host.values()) / GIB:,.1f}",
            }
        )
    return [
        *text_table(rows, ("peak GiB", "free GiB", "micro-batch", "tokens/s per GPU", "host GiB")),
        f"free GiB: after a margin of {MARGIN:.0%} for the error of the formulas; negative: missing.",
        "host GiB: memory per machine; +host: activation_offload; no, host: not enough host memory.",
        *(["+tiles: tiled_mlp"] if any(option.workload.tiled_mlp for option in found) else []),
    ]


def _saving(own: Workload) -> list[str]:
    """How the run saves memory: activation checkpointing, and further options."""
    size = own.sequence_parallel_size
    further = {"host": offloaded(own), "tiles": own.tiled_mlp, f"sequence parallel {size}": size > 1}
    return [checkpointing_word(own.gradient_checkpointing), *(word for word, is_on in further.items() if is_on)]


def rows_of(own: Workload) -> str:
    """The rows of a workload: ``rows of 4,096 tokens``."""
    of_images = f", {own.image_tokens:,} of them image or audio tokens" if own.image_tokens else ""
    if own.sequences == 2 and not own.packing:
        return f"two rows of {own.length:,} tokens per pair{of_images}"
    return f"{'packs' if own.packing else 'rows'} of {own.width:,} tokens{of_images}"


def parts(memory: Memory) -> list[str]:
    """GPU memory at the peak, host memory and disk by component, a line each."""
    lines = [f"GPU memory at the peak ({memory.moment}), {gib(memory.peak)}:"]
    lines += [f"  {name:<34} {gib(number):>10}" for name, number in memory.components.items() if number > GIB / 100]
    for title, sizes in (("host memory per machine:", memory.host), ("disk:", memory.disk)):
        lines += [title, *(f"  {name:<34} {gib(number):>10}" for name, number in sizes.items())]
    return lines


def command(option: Option, request: PlanRequest) -> str:
    """The command that runs ``option``."""
    own = option.workload
    words = command_of("finetune.py").split()
    words += ["--config", own.config if own.num_machines == 1 else f"my-{own.config}.yaml"]
    if request.recipe_name:
        words += ["--recipe", request.recipe_name]
    if own.num_gpus > 1:
        words += ["--num_processes", str(own.num_gpus)]
    if own.sequence_parallel_size > 1:
        words += ["--sequence_parallel_size", str(own.sequence_parallel_size)]
    chosen = {
        "method": own.method,
        "optim": own.optim,
        "per_device_train_batch_size": own.rows,
        "gradient_checkpointing": own.gradient_checkpointing,
        "activation_offload": own.activation_offload,
        "tiled_mlp": own.tiled_mlp,
    }
    taken = request.recipe.model_copy(update=chosen).model_dump(mode="json", exclude_none=True)
    base = {key: info.get_default(call_default_factory=True) for key, info in Recipe.model_fields.items()}
    if request.recipe_name:
        base = request.recipe.model_dump(mode="json", exclude_none=True)  # the file with what was typed
    for key in Recipe.model_fields:
        # The data are named even where the recipe has some, which are not the user's own.
        if key in request.typed or key == "dataset" or taken.get(key) != base.get(key):
            words += [f"--{key}", typed(key, taken.get(key))]
    return shlex.join(words)


def longest_rows(option: Option) -> list[str]:
    """The longest sequences that fit, one line for all sizes of the sequence-parallel group."""
    found = {size: longest_row(option, size) for size in sequence_parallel_sizes(option.workload)}
    alone, *parallel = (f"{length:,} with {size}" for size, length in found.items())
    if not parallel:
        return []
    first = alone.removesuffix(" with 1")
    return [
        f"longest sequence, by memory and with --gradient_checkpointing true: {first} tokens; "
        f"with sequence parallelism (--sequence_parallel_size): {', '.join(parallel)}"
    ]


def own_config(own: Workload) -> str:
    """What to do where no shipped config fits the command; empty if one does."""
    if own.num_machines == 1:
        return ""
    copied = f"my-{own.config}.yaml: a copy of accelerate_configs/{own.config}.yaml"
    return f"on each of the {own.num_machines} machines, with {copied} (docs/multi-node-and-debugging.md)"


def time_lines(
    option: Option, num_steps: int | None, price: float | None = None, lengths: Lengths | None = None
) -> list[str]:
    """Tokens per second, hours and cost, as ranges.

    Args:
        num_steps: of the run; None: not known.
        lengths: of the data; None: not known, so every row has ``max_length`` tokens.
    """
    own = option.workload
    step = lengths.step_of(own, option.gpu) if lengths else option.step
    lines = [str(lengths)] if lengths else []
    if step is None:
        return [*lines, f"time: unknown for {option.gpu.name}; name a GPU, such as --gpu rtx4090"]
    fast, slow = step.seconds
    num_steps = num_steps or (lengths.num_steps if lengths else 1000)
    lines.append(
        f"time: {_range((fast, slow))} s per step of {step.tokens * own.num_gpus:,} tokens with padding, "
        f"{_range(step.tokens_per_second)} tokens/s per GPU"
    )
    # Before the first step the reference model, or the teacher of offline distillation, reads each sample once.
    first = own.first_passes * forward_operations_per_token(own)
    if own.teacher_top_k and (teacher := own.as_teacher):
        first = forward_operations_per_token(teacher)
    before = first / operations_per_token(own) / max(1.0, lengths.epochs if lengths else 1.0) * num_steps
    hours = [(num_steps + before) * each / 3600 for each in (fast, slow)]
    of_gpus = [own.num_gpus * each for each in hours]
    text = f"{num_steps:,} step{'s' if num_steps > 1 else ''}: {_range(hours, 3)} hours"
    text += f", {_range(of_gpus, 3)} GPU-hours" if own.num_gpus > 1 else ""
    text += f", cost {price * of_gpus[0]:,.2f} to {price * of_gpus[1]:,.2f}" if price is not None else ""
    reader = "teacher" if own.teacher_top_k else "reference"
    text += f", with the {reader} model's pass before the first step" if before else ""
    text += "" if lengths else f" (if every row has {own.width:,} tokens, all supervised)"
    lines.append(text)
    if own.generated_rows:
        seconds = writing_seconds(own, option.gpu)
        hours = [num_steps * each / 3600 for each in seconds]
        rollouts = f"rollouts: at least {_range(seconds)} s per step in addition, {_range(hours, 3)} hours"
        most = "max_turns of max_new_tokens, or max_length" if own.turns > 1 else "max_new_tokens"
        lines.append(f"{rollouts}, if every completion has {most}")
    return lines


def _range(pair: Iterable[float], figures: int = 2) -> str:
    """Two numbers with so many digits that count, and without an exponent."""
    rounded = (float(f"{value:.{figures}g}") for value in pair)
    return " to ".join(f"{value:,.0f}" if value >= 10 ** (figures - 1) else f"{value:.6g}" for value in rounded)
