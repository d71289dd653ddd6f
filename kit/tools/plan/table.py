"""A plan as lines: the ways to run a recipe, the recommended one, and all recipes at a glance.

Promises: ``fitted`` lines have at most ``WIDTH`` columns, unless a single word has more; commands stay commands.
"""

import json
import math
import os
import re
import shlex
import textwrap
from collections.abc import Container, Iterable
from itertools import pairwise
from typing import Any

from kit.config.recipe import ACCELERATE_CONFIGS, Recipe
from kit.config.scripts import command_of
from kit.memory.activations import offloaded
from kit.memory.fit import checkpointing_word
from kit.memory.formulas import ASSUMED, Memory, limits_of_rows
from kit.memory.workload import Workload
from kit.tools.plan.ask import Ask, Question
from kit.tools.plan.hardware import Gpu
from kit.tools.plan.lengths import Lengths
from kit.tools.plan.search import MARGIN, Option, fewest
from kit.tools.plan.speed import SOURCE, Step, forward_pass
from kit.visible import Layout, one_line

GIB = 2**30
WIDTH = 100  # columns of a terminal that most people have
UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
NOTE = "Planned by formulas, not measured: --explain says from what."


def gib(num_bytes: float) -> str:
    """Return bytes as a string: ``17.6 GiB``."""
    return f"{num_bytes / GIB:.1f} GiB"


def missing(option: Option) -> str:
    """What is missing where a way does not fit: memory of a GPU, or of a machine. Rounded up, so it is never 0."""
    num_bytes = -option.spare if option.spare < 0 else option.missing_host
    return f"{math.ceil(10 * num_bytes / GIB) / 10:.1f} GiB{'' if option.spare < 0 else ' of host memory'}"


def fitted(lines: Iterable[str]) -> Layout:
    """Return ``lines``, each as one or several of at most ``WIDTH`` columns, as text for ``kit.console.show``."""
    found = []
    for line in map(one_line, lines):
        indent = re.match(r" *(?:\S+(?: \S+){0,3} {2,})?", line)  # of the second column, or of the line
        wrapped = textwrap.wrap(
            line,
            WIDTH,
            subsequent_indent=" " * (indent.end() if indent else 0) or "  ",
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        found += wrapped if len(line) > WIDTH else [line]
    return Layout("\n".join(found))


def to_type(text: str) -> list[str]:
    """Return a command as lines of a shell that fit ``WIDTH`` columns, each flag beside its value."""
    words = [shlex.quote(word) for word in shlex.split(one_line(text))]
    starts = [0, *(i for i, word in enumerate(words) if word.startswith("--") and i), len(words)]
    groups = [" ".join(words[start:end]) for start, end in pairwise(starts)]
    lines = ["    " + groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + 3 <= WIDTH:
            lines[-1] += f" {group}"
        else:
            lines[-1] += " \\"
            lines.append(" " * 8 + group)
    return lines


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
                _in_gib(option.memory.peak),
                _in_gib(option.spare),
                str(own.rows),
                checkpointing_word(own.gradient_checkpointing) + ("+host" if offloaded(own) else ""),
                _range(option.step.tokens_per_second) if option.step else "-",
                _in_gib(sum(option.memory.host.values())),
            ]
        )
    above = ["", "", "", "GPU GiB", "GPU GiB", "micro-", "check-", "tokens/s", "host"]
    titles = ["method", "config", "fits", "peak", "free", "batch", "pointing", "per GPU", "GiB"]
    notes = [
        f"free: beside {MARGIN:.0%} of the GPU that stay unused, since the formulas may be wrong; below 0: missing.",
        "host: memory of each machine.",
    ]
    if any(offloaded(option.workload) for option in found):
        notes.append("+host: with activation_offload, layers' inputs wait in the host's memory.")
    if found[0].workload.sequences == 2:
        notes.append("micro-batch: of pairs, each of two sequences.")
    if any(option.spare >= 0 and option.missing_host for option in found):
        notes.append("no, host: the GPUs are large enough, the machine's memory is not.")
    return [*table(above, [titles, *rows], numbers=(3, 4, 5, 7, 8)), *notes]


def _in_gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f}"


def rows_of(own: Workload) -> str:
    """The rows of a workload: ``rows of 4,096 tokens``."""
    if own.sequences == 2 and not own.packing:
        return f"two rows of {own.length:,} tokens for each pair"
    return f"{'packs' if own.packing else 'rows'} of {own.width:,} tokens"


def needs(option: Option) -> list[str]:
    """What the recommended way takes of a GPU and of each machine, and how far it could go."""
    memory, own = option.memory, option.workload
    lines = [f"each GPU: {gib(memory.peak)} of {gib(option.gpu.memory)}"]
    if own.rows * own.micro_batches > 1 or own.length < option.largest_length:
        lines.append(
            f"longest {'sequences' if own.sequences == 2 else 'rows'} that fit: {option.largest_length:,} tokens, with "
            "micro-batch 1 and gradient checkpointing"
        )
    all_kept = "; and each further checkpoint" if own.num_checkpoints is None else ""
    host, disk = sum(memory.host.values()), sum(memory.disk.values())
    return [*lines, f"each machine: {gib(host)} of memory, {gib(disk)} of disk{all_kept}"]


def parts(memory: Memory) -> list[str]:
    """What fills a GPU at the peak, the host's memory and the disk, a line each."""
    lines = [f"a GPU at its peak ({memory.moment}), {gib(memory.peak)}:"]
    lines += [f"  {name:<22} {gib(number):>10}" for name, number in memory.components.items() if number > GIB / 100]
    for title, sizes in (("memory of a machine:", memory.host), ("disk:", memory.disk)):
        lines += [title, *(f"  {name:<34} {gib(number):>10}" for name, number in sizes.items())]
    return lines


def limits(own: Workload) -> list[str]:
    """What limits how long rows can be, a line each, the largest first."""
    sizes = sorted(limits_of_rows(own).items(), key=lambda entry: -entry[1])
    lines = [f"  {name:<45} {gib(number):>10}" for name, number in sizes if number > GIB / 100]
    return [f"what limits the length of rows, here {own.width:,} tokens, micro-batch {own.rows}:", *lines]


def command(option: Option, question: Question) -> str:
    """The command that runs ``option``."""
    own, recipe = option.workload, question.recipe
    words = start_words(own)
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


def start_words(own: Workload) -> list[str]:
    """The words of the command up to the recipe. In float32 no shipped config will do, and one process needs none."""
    words = command_of("finetune.py").split()
    if own.bf16 or own.num_machines > 1:
        return [*words, "--config", own.config]
    if own.num_gpus > 1:
        return [*words, "--config", f"{own.config}-float32.yaml"]
    return [*words[:2], "--mixed_precision", "no", "--num_processes", "1", *words[2:]] if len(words) > 2 else words


def on_machines(option: Option) -> list[str]:
    """What the command needs beside: in float32 a config, on several machines another one; else nothing."""
    own = option.workload
    if own.num_machines == 1:
        if own.bf16 or own.num_gpus == 1:
            return []
        path = os.path.relpath(ACCELERATE_CONFIGS / f"{own.config}.yaml")
        return ["Its config is a copy in float32:", f"    sed 's/: bf16/: no/' {path} > {own.config}-float32.yaml"]
    keys = [f"num_machines: {own.num_machines}", "main_process_ip", "main_process_port"]
    if not own.bf16:
        keys.append("mixed_precision: no")
    if own.num_replicas > 1:
        keys.insert(0, f"parallelism_config_dp_replicate_size: {own.num_replicas}")
    return [
        f"On {own.num_machines} machines: the same command on each, its --config a copy of "
        f"accelerate_configs/{own.config}.yaml that says {', '.join(keys)}: docs/multi-node.md.",
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
        "optim": own.optim,
        "per_device_train_batch_size": own.rows,
        "gradient_checkpointing": own.gradient_checkpointing,
        "activation_offload": own.activation_offload,
    }
    return typed | {key: value for key, value in chosen.items() if key in typed or value != getattr(recipe, key)}


def data_line(lengths: Lengths, is_pairs: bool = False) -> str:
    """What the data are like, and whether all of them were counted."""
    sample = f", one block in {lengths.every} of the data," if lengths.every > 1 else ""
    what = f"pairs{sample} of two sequences" if is_pairs else f"samples{sample}"
    each = " each" if is_pairs else ""
    return (
        f"data: {lengths.num_samples:,} {what} of {lengths.shortest:,} to {lengths.longest:,} tokens{each}, mean "
        f"{lengths.mean:,.0f}; of the computed tokens {lengths.padding:.1%} are padding and "
        f"{lengths.supervised:.1%} are learned from; {lengths.num_shapes} "
        f"shape{'s' if lengths.num_shapes > 1 else ''} in {lengths.num_micro_batches:,} micro-batches; "
        f"a GPU waits {lengths.waiting:.0%} of the time for the one with the longest rows"
    )


def _bound(step: Step, workload: Workload) -> str:
    """What takes longest, and of the host what helps."""
    if step.bound != "launches":
        return step.bound
    rows = "packing, or rows in a micro-batch" if not workload.packing else "packs in a micro-batch"
    compiled = "" if workload.fuses else ", or --torch_compile true"
    return f"the host, which launches {step.launches:,.0f} kernels for it: more {rows}{compiled} helps"


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
    lines = [data_line(lengths, own.sequences == 2)] if lengths else []
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
    both = " of both halves of the pairs" if own.sequences == 2 else ""
    lines.append(
        f"time: {_figures(fast, 2)} to {_figures(slow, 2)} s a step of {tokens:,.0f} tokens{both}, padding included, "
        f"{_range((low, high))} tokens/s per GPU{text}; bound by {_bound(step, own)}"
    )
    if own.passes:
        lines.append(f"of it {step.passes_share:.0%} in {_passes(own)}")
    before = _seconds_before(option, num_steps, lengths)
    if own.first_passes:
        each = "the samples" if own.first_passes == 1 else "the samples, and over as many mismatched ones,"
        lines.append(
            f"before the first step: {_duration(before)} for the reference's pass over {each} without gradients; a "
            "later run with the same model and data finds the result in the cache"
        )
    whole = (num_steps * fast + before[0], num_steps * slow + before[1])
    hours = [seconds * own.num_gpus / 3600 for seconds in whole]
    text = f"{num_steps:,} step{'s' if num_steps > 1 else ''}{', with it' if own.first_passes else ''}: "
    text += _duration(whole)
    text += f", {_figures(hours[0], 3)} to {_figures(hours[1], 3)} GPU-hours" if own.num_gpus > 1 else ""
    text += f", cost {price * hours[0]:,.2f} to {price * hours[1]:,.2f}" if price is not None else ""
    if lengths is None:
        what = "both halves of every pair have" if own.sequences == 2 else "every sample has"
        packed = "packs are full" if own.packing else f"{what} max_length {own.length:,} tokens"
        text += f" (if {packed}, and all tokens are learned from)"
    return [*lines, text]


def _passes(own: Workload) -> str:
    """What the passes without gradients of a step are."""
    if own.precomputes_reference:
        return "a pass without gradients: the model's over mismatched samples"
    of_reference = "the reference's (the model without its adapters)"
    if own.passes == 1:
        return f"a pass without gradients: {of_reference}"
    return f"{own.passes} passes without gradients: {of_reference}, and those of both over mismatched samples"


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


def all_recipes(ask: Ask, gpus: list[Gpu]) -> list[str]:
    """A table of all recipes: on how few of each GPU they fit, and with which config."""
    rows = []
    for question in ask.questions:
        base, batch = ask.workload(question), question.recipe.global_batch_size
        found = [fewest(base, batch, gpu, ask.num_gpus) for gpu in gpus]
        rows.append([question.recipe_name or question.shape.name, *map(_in_short, found)])
    return [
        *table(["", *(gpu.name for gpu in gpus)], [["recipe", *(gib(gpu.memory) for gpu in gpus)], *rows]),
        "*: with gradient checkpointing. offload: fsdp_offload, weights wait in the machine's memory.",
        "Each is the fewest GPUs that fit. How long it takes, and what to type: kit plan --recipe R --gpu G",
    ]


def _in_short(option: Option) -> str:
    own = option.workload
    if not option.fits:
        return f"no, {missing(option)} missing" if option.spare < 0 else "no, host too small"
    config = own.config.removeprefix("fsdp_") if own.strategy.offloads else own.config
    return f"{own.num_gpus} x {config}{' *' if own.gradient_checkpointing else ''}"


def explanation(option: Option) -> list[str]:
    """Where each number comes from."""
    own, shape = option.workload, option.workload.shape
    dtype, plain = ("bf16", "2 bytes each, bf16") if own.bf16 else ("float32", "4 bytes each, float32")
    lines = [
        f"{shape.name}: {shape.num_parameters:,} parameters, {own.trainable_parameters:,} of them trained",
        "  trainable weights      4 bytes each, float32; over all GPUs with FSDP",
        f"  frozen weights         {plain}; of qlora, those outside the layers' matrices",
        "  4-bit weights          0.5 bytes, and 0.0159 for the scales of NF4 with double quantisation (not sharded)",
        "  gradients              4 bytes; with FSDP the input of a reduction too, one layer or the head in float32",
        "  optimiser              8 bytes, two moments in float32; 2 with the 8-bit ones",
        f"  gathered weights       of FSDP, two layers in {dtype}, and the head while the loss is computed",
        f"  dequantised weights    of qlora, the largest matrix of a layer in {dtype}",
        "  logits                 of one chunk in float32, with its gradient: kit/model/chunks.py",
        "  activations            what autograd keeps of each layer, by kit/memory/activations.py",
        *(f"  {name:<22} assumed {reason}" for name, reason in ASSUMED.items()),
        "The formulas agree within 5 % with the kit's own step on fake tensors, and within 10 % with what other kits "
        "published for theirs: benchmarks/plan_accuracy.py.",
        f"Time: {SOURCE}.",
    ]
    gpu = option.gpu
    if gpu.tflops and gpu.bandwidth:
        lines.append(
            f"{gpu.name}, by its datasheet: {gpu.tflops:g} {dtype} TFLOP/s, {gpu.bandwidth / 1e9:g} GB/s of memory, "
            f"{gpu.link / 1e9:g} GB/s to the next GPU, {gpu.network / 1e9:g} GB/s to other machines (assumed)"
        )
    return lines
