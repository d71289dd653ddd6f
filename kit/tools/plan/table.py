"""A plan as lines: the ways to run a recipe, the recommended one, and all recipes at a glance."""

import json
import shlex
from collections.abc import Container
from typing import Any

from kit.config.scripts import command_of
from kit.memory.activations import offloaded
from kit.memory.fit import MARGIN, checkpointing_word
from kit.memory.formulas import Memory
from kit.memory.workload import Workload
from kit.tools.plan.ask import Question
from kit.tools.plan.lengths import Lengths
from kit.tools.plan.search import Option
from kit.tools.plan.speed import forward_pass

GIB = 2**30
UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}


def gib(num_bytes: float) -> str:
    """Return bytes as a string: ``17.6 GiB``."""
    return f"{num_bytes / GIB:,.1f} GiB"


def table(titles: list[str], rows: list[list[str]], numbers: Container[int] = ()) -> list[str]:
    """Lines of a table with aligned columns. ``numbers``: the columns that are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in [titles, *rows]:
        cells = zip(row, widths, strict=True)
        aligned = (cell.rjust(width) if i in numbers else cell.ljust(width) for i, (cell, width) in enumerate(cells))
        lines.append("  ".join(aligned).rstrip())
    return lines


def ways(found: list[Option]) -> list[str]:
    """A table with a line for each way to run the recipe, as ``options`` returns them."""
    rows = []
    for option in found:
        own = option.workload
        rows.append(
            [
                own.method,
                own.config,
                "yes" if option.fits else "no" if option.spare < 0 else "no, host",
                f"{option.memory.peak / GIB:,.1f}",
                f"{option.spare / GIB:,.1f}",
                str(own.rows),
                checkpointing_word(own.gradient_checkpointing) + ("+host" if offloaded(own) else ""),
                _range(option.step.tokens_per_second) if option.step else "-",
                f"{sum(option.memory.host.values()) / GIB:,.1f}",
            ]
        )
    above = ["", "", "", "GPU GiB", "GPU GiB", "micro-", "check-", "tokens/s", "host"]
    titles = ["method", "config", "fits", "peak", "free", "batch", "pointing", "per GPU", "GiB"]
    return [
        *table(above, [titles, *rows], numbers=(3, 4, 5, 7, 8)),
        f"free: beside {MARGIN:.0%} of the GPU that stay unused, since the formulas may be wrong; below 0: missing.",
        "host: memory of each machine; +host: activation_offload; no, host: the machine's memory is too small.",
    ]


def rows_of(own: Workload) -> str:
    """The rows of a workload: ``rows of 4,096 tokens``."""
    if own.sequences == 2 and not own.packing:
        return f"two rows of {own.length:,} tokens for each pair"
    return f"{'packs' if own.packing else 'rows'} of {own.width:,} tokens"


def parts(memory: Memory) -> list[str]:
    """What fills a GPU at the peak, the host's memory and the disk, a line each."""
    lines = [f"a GPU at its peak ({memory.moment}), {gib(memory.peak)}:"]
    lines += [f"  {name:<34} {gib(number):>10}" for name, number in memory.components.items() if number > GIB / 100]
    for title, sizes in (("memory of a machine:", memory.host), ("disk:", memory.disk)):
        lines += [title, *(f"  {name:<34} {gib(number):>10}" for name, number in sizes.items())]
    return lines


def command(option: Option, question: Question) -> str:
    """The command that runs ``option``."""
    own, recipe = option.workload, question.recipe
    words = command_of("finetune.py").split()
    if own.bf16 or own.num_gpus > 1:
        words += ["--config", own.config if own.bf16 and own.num_machines == 1 else f"my-{own.config}.yaml"]
    elif len(words) > 2:  # in float32 one process needs no config, and no shipped one will do
        words = [*words[:2], "--mixed_precision", "no", "--num_processes", "1", *words[2:]]
    values: dict[str, Any] = recipe.model_dump(mode="json", exclude_none=True)
    if question.recipe_name:
        words += ["--recipe", question.recipe_name]
        words += ["--dataset", _flag("dataset", values["dataset"])] if "dataset" in question.typed else []
    else:
        words += ["--model_name_or_path", recipe.model_name_or_path, "--dataset", _flag("dataset", values["dataset"])]
    if not question.recipe_name or own.method != recipe.method:
        words += ["--method", own.method]
    if own.num_gpus > 1:
        words += ["--num_processes", str(own.num_gpus)]
    changed = _changes(option, question)
    values = recipe.model_copy(update=changed).model_dump(mode="json", exclude_none=True)
    for key in changed:
        if f"--{key}" not in words:
            words += [f"--{key}", _flag(key, values.get(key))]
    return shlex.join(words)


def own_config(own: Workload) -> str:
    """What the config of the command must say where no shipped one will do; empty if one does."""
    says = [f"parallelism_config_dp_replicate_size: {own.num_replicas}"] if own.num_replicas > 1 else []
    if own.num_machines > 1:
        says += [f"num_machines: {own.num_machines}", "main_process_ip", "main_process_port"]
    if not own.bf16 and own.num_gpus > 1:
        says.append("mixed_precision: no")
    if own.num_machines == 1 and not says:
        return ""
    where = f"on each of the {own.num_machines} machines (docs/multi-node.md), " if own.num_machines > 1 else ""
    return (
        f"{where}with my-{own.config}.yaml: a copy of accelerate_configs/{own.config}.yaml that says {', '.join(says)}"
    )


def _flag(key: str, value: Any) -> str:
    """A setting as it is typed on the command line. ``value``: in JSON."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if key == "dataset_columns":
        return ",".join(f"{theirs}={ours}" for theirs, ours in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def _changes(option: Option, question: Question) -> dict[str, str | int | bool]:
    """The keys of the recipe, but for the method, that ``option`` sets otherwise, or that no recipe file sets."""
    own, recipe = option.workload, question.recipe
    typed = {key: getattr(recipe, key) for key in question.typed if key not in ("method", "dataset")}
    chosen = {
        "optim": own.optim,
        "per_device_train_batch_size": own.rows,
        "gradient_checkpointing": own.gradient_checkpointing,
        "activation_offload": own.activation_offload,
    }
    return typed | {key: value for key, value in chosen.items() if key in typed or value != getattr(recipe, key)}


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
        return [*lines, f"time: nothing is known of a GPU named {option.gpu.name}; name one, as --gpu rtx4090"]
    fast, slow = step.seconds
    computing = 1 - lengths.waiting if lengths else 1.0
    low, high = (computing * rate for rate in step.tokens_per_second)
    num_steps = num_steps or (lengths.num_steps if lengths else 1000)
    tokens = computing * step.tokens * own.num_gpus
    lines.append(
        f"time: {_figures(fast, 2)} to {_figures(slow, 2)} s a step of {tokens:,.0f} tokens, padding included, "
        f"{_range((low, high))} tokens/s per GPU; bound by {step.bound}"
    )
    before = _seconds_before(option, num_steps, lengths)
    whole = (num_steps * fast + before[0], num_steps * slow + before[1])
    hours = [seconds * own.num_gpus / 3600 for seconds in whole]
    text = f"{num_steps:,} step{'s' if num_steps > 1 else ''}: {_duration(whole)}"
    text += f", {_figures(hours[0], 3)} to {_figures(hours[1], 3)} GPU-hours" if own.num_gpus > 1 else ""
    text += f", cost {price * hours[0]:,.2f} to {price * hours[1]:,.2f}" if price is not None else ""
    text += f"; of it {_duration(before)} for the reference before the first step" if own.first_passes else ""
    text += "" if lengths else f" (if every row is full, {own.width:,} tokens, and all are learned from)"
    return [*lines, text]


def _seconds_before(option: Option, num_steps: int, lengths: Lengths | None) -> tuple[float, float]:
    """The shortest and the longest time before the first step, in which the reference reads each sample once."""
    own = option.workload
    one = lengths.pass_of(own, option.gpu) if lengths else forward_pass(own, option.gpu)
    if one is None or not own.first_passes:
        return 0.0, 0.0
    steps_with_new_samples = num_steps / max(1.0, lengths.epochs) if lengths else num_steps
    fast, slow = (own.first_passes * steps_with_new_samples * seconds for seconds in one.seconds)
    return fast, slow


def _duration(seconds: tuple[float, float]) -> str:
    """A range of seconds in the largest unit of which it is at least one."""
    unit = next((unit for unit in UNITS if seconds[1] >= UNITS[unit]), "seconds")
    return f"{' to '.join(_figures(each / UNITS[unit], 3) for each in seconds)} {unit}"


def _figures(value: float, figures: int) -> str:
    """A number with ``figures`` digits that count, and never with an exponent."""
    rounded = float(f"{value:.{figures}g}")
    return f"{rounded:,.0f}" if rounded >= 10 ** (figures - 1) else f"{rounded:f}".rstrip("0").rstrip(".")


def _range(pair: tuple[float, float]) -> str:
    return " to ".join(f"{value:,.0f}" if value < 1000 else f"{round(value, -2):,.0f}" for value in pair)


def in_short(option: Option | None) -> str:
    """A way in a cell of the table of all recipes: ``2 x ddp *``."""
    if option is None:
        return "no"
    own = option.workload
    config = own.config.removeprefix("fsdp_") if own.strategy.offloads else own.config
    return f"{own.num_gpus} x {config}{' *' if own.gradient_checkpointing else ''}"


def record(option: Option) -> dict[str, Any]:
    """A way as JSON values; sizes in bytes, times in seconds."""
    own, memory, step = option.workload, option.memory, option.step
    return {
        "method": own.method,
        "config": own.config,
        "num_gpus": own.num_gpus,
        "per_device_train_batch_size": own.rows,
        "max_length": own.length,
        "gradient_checkpointing": own.gradient_checkpointing,
        "activation_offload": own.activation_offload,
        "fits": option.fits,
        "spare": option.spare,
        "peak": memory.peak,
        "components": memory.components,
        "host": memory.host,
        "disk": memory.disk,
        "seconds_per_step": step and step.seconds,
        "tokens_per_second": step and step.tokens_per_second,
    }
