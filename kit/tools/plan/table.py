"""A plan as lines: the ways to run a recipe, the recommended one, all recipes at a glance, and what scale does."""

import json
import shlex
from typing import Any

from kit.config.recipe import Recipe
from kit.config.scripts import command_of
from kit.memory.formulas import ASSUMED, Memory
from kit.memory.workload import Workload
from kit.tools.plan.ask import Ask, Question
from kit.tools.plan.hardware import Gpu
from kit.tools.plan.lengths import Lengths
from kit.tools.plan.search import MARGIN, Option, ScaledStep, fewest
from kit.tools.plan.speed import SOURCE

GIB = 2**30
UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
NOTE = "Planned by formulas, not measured: --explain says from what."


def gib(num_bytes: float) -> str:
    """Return bytes as a string: ``17.6 GiB``."""
    return f"{num_bytes / GIB:.1f} GiB"


def verdict(option: Option) -> str:
    """Whether it fits, with what, and what is left or missing."""
    if not option.fits:
        return f"does not fit, {missing(option)} missing"
    how = " with checkpointing" if option.workload.gradient_checkpointing else ""
    return f"fits{how}, {gib(option.spare)} free"


def missing(option: Option) -> str:
    """What is missing where a way does not fit: memory of a GPU, or of a machine."""
    return gib(-option.spare) if option.spare < 0 else f"{gib(option.missing_host)} of host memory"


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [titles, *rows]]
    return [line.rstrip() for line in lines]


def ways(found: list[Option]) -> list[str]:
    """A table with a line for each way to run the recipe, as ``options`` returns them."""
    rows = []
    for option in found:
        own = option.workload
        rows.append(
            [
                own.method,
                own.config,
                verdict(option),
                gib(option.memory.peak),
                str(own.rows),
                f"{option.largest_length:,}" if option.largest_length else "-",
                checkpointing(option),
                _range(option.step.tokens_per_second) if option.step else "-",
                gib(sum(option.memory.host.values())),
            ]
        )
    titles = ["method", "config", "memory of a GPU", "peak", "micro-batch", "max_length", "gradient checkpointing"]
    margin = f"Free and missing leave {MARGIN:.0%} of a GPU's memory unused, since the formulas may be wrong"
    notes = [f"{margin}.", "max_length: the longest that fits, with micro-batch 1 and gradient checkpointing."]
    return [*table([*titles, "tokens/s per GPU", "host memory"], rows), *notes]


def checkpointing(option: Option) -> str:
    """Whether gradient checkpointing pays in this way to run."""
    other = option.other_checkpointing()
    on, off = (option, other) if option.workload.gradient_checkpointing else (other, option)
    if off.spare >= 0:
        if on.step and off.step:
            costs = on.step.seconds[0] / off.step.seconds[0] - 1
            return f"not needed: costs {costs:.0%} time, spares {gib(off.memory.peak - on.memory.peak)}"
        return f"not needed: spares {gib(off.memory.peak - on.memory.peak)}"
    return "needed" if on.spare >= 0 else "not enough"


def parts(memory: Memory) -> list[str]:
    """What fills a GPU at the peak, the host's memory and the disk, a line each."""
    lines = [f"a GPU at its peak ({memory.moment}), {gib(memory.peak)}:"]
    lines += [f"  {name:<22} {gib(number):>10}" for name, number in memory.components.items() if number > GIB / 100]
    for title, sizes in (("memory of a machine:", memory.host), ("disk:", memory.disk)):
        lines += [title, *(f"  {name:<34} {gib(number):>10}" for name, number in sizes.items())]
    return lines


def command(option: Option, question: Question) -> str:
    """The command that runs ``option``."""
    own, recipe = option.workload, question.recipe
    words = [*command_of("finetune.py").split(), "--config", own.config]
    if question.recipe_name:
        words += ["--recipe", question.recipe_name]
        words += ["--dataset", _flag(recipe, "dataset")] if "dataset" in question.typed else []
    else:
        words += ["--model_name_or_path", recipe.model_name_or_path, "--dataset", _flag(recipe, "dataset")]
    if not question.recipe_name or own.method != recipe.method:
        words += ["--method", own.method]
    if own.num_gpus > 1:
        words += ["--num_processes", str(own.num_gpus)]
    changed = changes(option, question)
    for key in changed:
        if f"--{key}" not in words:
            words += [f"--{key}", _flag(recipe.model_copy(update=changed), key)]
    return shlex.join(words)


def on_machines(option: Option) -> list[str]:
    """What the command needs on several machines; nothing on one."""
    own = option.workload
    if own.num_machines == 1:
        return []
    keys = [f"num_machines: {own.num_machines}", "main_process_ip", "main_process_port"]
    if own.num_replicas > 1:
        keys.insert(0, f"parallelism_config_dp_replicate_size: {own.num_replicas}")
    return [
        f"On {own.num_machines} machines: the same command on each, its --config a copy of "
        f"accelerate_configs/{own.config}.yaml that says",
        f"{', '.join(keys)}: docs/multi-node.md.",
    ]


def _flag(recipe: Recipe, key: str) -> str:
    """A setting as it is typed on the command line."""
    value: Any = recipe.model_dump(mode="json", exclude_none=True).get(key)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if key == "dataset_columns":
        return ",".join(f"{theirs}={ours}" for theirs, ours in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def changes(option: Option, question: Question) -> dict[str, str | int | bool]:
    """The keys of the recipe, but for the method, that ``option`` sets otherwise, or that no recipe file sets."""
    own, recipe = option.workload, question.recipe
    typed = {key: getattr(recipe, key) for key in question.typed if key not in ("method", "dataset")}
    chosen = {
        "per_device_train_batch_size": own.rows,
        "gradient_checkpointing": own.gradient_checkpointing,
    }
    return typed | {key: value for key, value in chosen.items() if key in typed or value != getattr(recipe, key)}


def data_line(lengths: Lengths) -> str:
    """What the data are like, and whether all of them were counted."""
    sample = f", one block in {lengths.every} of the data," if lengths.every > 1 else ""
    return (
        f"data: {lengths.num_samples:,} samples{sample} of {lengths.shortest:,} to {lengths.longest:,} tokens, mean "
        f"{lengths.mean:,.0f}; of the computed tokens {lengths.padding:.1%} are padding and "
        f"{lengths.supervised:.1%} are learned from; "
        f"a GPU waits {lengths.waiting:.0%} of the time for the one with the longest rows"
    )


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
    lines = [data_line(lengths)] if lengths else []
    if step is None:
        what = "time" if price is None else "time, and so no cost"
        return [*lines, f"{what}: nothing is known of a GPU named {option.gpu.name}; name one, as --gpu rtx4090"]
    fast, slow = step.seconds
    computing = 1 - lengths.waiting if lengths else 1.0
    low, high = (computing * rate for rate in step.tokens_per_second)
    num_steps = num_steps or (lengths.num_steps if lengths else 1000)
    useful = 1 - lengths.padding if lengths else 1.0
    text = f", {_range((low * useful, high * useful))} without padding" if lengths else ""
    tokens = computing * step.tokens * own.num_gpus
    lines.append(
        f"time: {_figures(fast, 2)} to {_figures(slow, 2)} s a step of {tokens:,.0f} tokens, padding included, "
        f"{_range((low, high))} tokens/s per GPU{text}; bound by {step.bound}"
    )
    hours = [num_steps * seconds * own.num_gpus / 3600 for seconds in (fast, slow)]
    unit = next((unit for unit in UNITS if num_steps * slow >= UNITS[unit]), "seconds")
    whole = [_figures(num_steps * seconds / UNITS[unit], 3) for seconds in (fast, slow)]
    text = f"{num_steps:,} step{'s' if num_steps > 1 else ''}: {' to '.join(whole)} {unit}"
    text += f", {_figures(hours[0], 3)} to {_figures(hours[1], 3)} GPU-hours" if own.num_gpus > 1 else ""
    text += f", cost {price * hours[0]:,.2f} to {price * hours[1]:,.2f}" if price is not None else ""
    if lengths is None:
        packed = "packs are full" if own.packing else f"every sample has max_length {own.length:,} tokens"
        text += f" (if {packed}, and all tokens are learned from)"
    return [*lines, text]


def _figures(value: float, figures: int) -> str:
    """A number with ``figures`` digits that count, and never with an exponent."""
    rounded = float(f"{value:.{figures}g}")
    return f"{rounded:,.0f}" if rounded >= 10 ** (figures - 1) else f"{rounded:f}".rstrip("0").rstrip(".")


def _range(pair: tuple[float, float]) -> str:
    return " to ".join(f"{value:,.0f}" if value < 1000 else f"{round(value, -2):,.0f}" for value in pair)


def all_recipes(ask: Ask, gpus: list[Gpu]) -> list[str]:
    """A table of all recipes: on how many of each GPU they fit, and with which config."""
    counts = [2**power for power in range(10)]
    if ask.num_gpus:
        counts = [*(n for n in counts if n < ask.num_gpus), ask.num_gpus]
    rows = []
    for question in ask.questions:
        cells = [question.recipe_name or "", question.shape.name, question.recipe.method]
        rows.append(
            [
                *cells,
                *(
                    _at_a_glance(fewest(ask.workload(question), question.recipe.global_batch_size, gpu, ask.num_gpus))
                    for gpu in gpus
                ),
            ]
        )
    return table(["recipe", "model", "method", *(f"{gpu.name} ({gib(gpu.memory)})" for gpu in gpus)], rows)


def _at_a_glance(option: Option) -> str:
    own = option.workload
    if not option.fits:
        return f"does not fit: {missing(option)} missing on {own.num_gpus} x, {own.config}"
    how = " with checkpointing" if own.gradient_checkpointing else ""
    host = f", host {gib(sum(option.memory.host.values()))}" if own.strategy.offloads else ""
    return f"fits{how}: {own.num_gpus} x, {own.config}, {gib(option.memory.peak)}{host}"


def scale(rows: list[ScaledStep], own: Workload) -> list[str]:
    """A table of what 8 to 4,096 GPUs do to ``own``, and where communication takes over."""
    cells = [
        [
            f"{row.num_gpus:,}",
            gib(row.peak),
            _range(row.tokens_per_second),
            f"{row.sent_share:.0%}",
            f"{row.group:,}" if row.group < row.num_gpus else "all",
            f"{row.group_sent_share:.0%}",
        ]
        for row in rows
    ]
    titles = ["GPUs", "peak", "tokens/s per GPU", "collectives / computation", "best group", "with it"]
    over = next((row.num_gpus for row in rows if row.sent_share > 1), None)
    end = f"Communication takes over at {over:,} GPUs." if over else "Computation hides the collectives at all of them."
    how = f"with{'' if own.gradient_checkpointing else 'out'} gradient checkpointing"
    more = ""
    if own.micro_batches > 1:
        more = f"; the {own.micro_batches} of the plan above would keep gradients between them"
    return [
        *table(titles, cells),
        f"{end} At the links' full rate.",
        f"A step of one micro-batch of {own.rows} x {own.length:,} tokens on each GPU with fsdp, {how}{more}.",
        "The best group is that of hybrid sharding: --config fsdp_hybrid, its parallelism_config_dp_shard_size; a row",
        "fsdp_hybrid of a plan takes the GPUs of a machine.",
    ]


def explanation(option: Option) -> list[str]:
    """Where each number comes from."""
    own, shape = option.workload, option.workload.shape
    lines = [
        f"{shape.name}: {shape.num_parameters:,} parameters, {own.trainable_parameters:,} of them trained",
        "  trainable weights      4 bytes each, float32; over all GPUs with FSDP",
        "  frozen weights         2 bytes each, bf16; of qlora, those outside the layers' matrices",
        "  4-bit weights          0.5 bytes, and 0.0159 for the scales of NF4 with double quantisation (not sharded)",
        "  gradients              4 bytes; with FSDP the input of a reduction too, one layer or the head in float32",
        "  optimiser              8 bytes, two moments in float32; 2 with the 8-bit ones",
        "  gathered weights       of FSDP, two layers in bf16, and the head while the loss is computed",
        "  dequantised weights    of qlora, the largest matrix of a layer in bf16",
        "  logits                 of one chunk of 128 MiB in float32, with its gradient: kit/model/loss_head.py",
        "  activations            what autograd keeps of each layer, by kit/memory/activations.py; of autocast also",
        "                         the bf16 copies of the weights",
        *(f"  {name:<22} assumed {reason}" for name, reason in ASSUMED.items()),
        "The formulas agree within 5 % with the kit's own step on fake tensors, and within 10 % with what other kits",
        "published for theirs: benchmarks/plan_accuracy.py.",
        f"Time: {SOURCE}.",
    ]
    gpu = option.gpu
    if gpu.tflops and gpu.bandwidth:
        lines.append(
            f"{gpu.name}, by its datasheet: {gpu.tflops:g} bf16 TFLOP/s, {gpu.bandwidth / 1e9:g} GB/s of memory, "
            f"{gpu.link / 1e9:g} GB/s to the next GPU, {gpu.network / 1e9:g} GB/s to other machines (assumed)"
        )
    return lines
