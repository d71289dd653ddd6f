"""``kit plan``: predict what fits a GPU and how long it takes, before a GPU is rented."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from kit.memory.fit import FOR_TEACHER
from kit.system.console import announce_wait, show
from kit.system.visible import joined
from kit.tools.plan.ask import OWN, Ask, read_ask
from kit.tools.plan.lengths import Lengths, measure_lengths, read_training_data
from kit.tools.plan.search import Option, options, recommend
from kit.tools.plan.shown_plan import command, gib, longest_rows, own_config, parts, rows_of, time_lines, ways

if TYPE_CHECKING:
    from kit.data.feed.data import Data

HELP = "predict the memory, time and cost of a run, and print the command to type"
_FLAGS = "\n".join(f"  --{name:<6} {meaning}" for name, meaning in OWN.items())
USAGE = f"""usage: kit plan [--recipe R | --model M] [--gpu G] [--gpus N] [--flag value ...]

{HELP}.

{_FLAGS}

Each key of a recipe is a flag too, as in recipes/finetune.py."""
NOTE = "Planned by formulas, not measured (docs/memory-and-speed.md)."


def run(argv: list[str]) -> int:
    """Print the plan. Raises ``UserError`` with all problems."""
    ask = read_ask(argv)
    show(joined([*_plan(ask), "", NOTE]))
    return 0


def _plan(ask: Ask) -> list[str]:
    """The recommended configuration with its memory, time and command, and the table of all configurations."""
    base, recipe = ask.workload, ask.recipe
    data = _data(ask)
    if data and base.shape.tower:
        base = replace(base, image_tokens=data.train.image_tokens(recipe.max_length if recipe.packing else None))
    found = options(base, ask.gpu, recipe.global_batch_size, ask.only)
    best = recommend(found, recipe.method)
    where = f"{base.num_gpus} x {ask.gpu.name}, {gib(ask.gpu.memory)} each"
    where += f", host memory {gib(ask.gpu.host)}" if math.isfinite(ask.gpu.host) else ""
    where += "" if ask.gpu.bf16 else "; in float32, because it has no bf16"
    title = f"{ask.shape.name}, {ask.shape.num_parameters:,} parameters; {rows_of(base)}"
    if best is None:
        none = "Nothing fits. Try a smaller --max_length, a smaller model, or more GPUs or host memory."
        return [title, where, "", *ways(found), "", f"{none} {FOR_TEACHER}." if ask.teacher else none]
    own = best.workload
    host = gib(sum(best.memory.host.values()))
    lines = [
        title,
        where,
        "",
        f"Recommended configuration: {own.method} with {own.config} ({host} host memory per machine)",
    ]
    if own.method != recipe.method:
        lines[-1] += f", since {recipe.method} does not fit"
    lines += [
        *time_lines(best, recipe.max_steps, ask.price, _lengths(data, ask, best)),
        "",
        "    " + command(best, ask),
    ]
    if note := own_config(own):
        lines.append(f"    {note}")
    return [
        *lines,
        *longest_rows(best),
        "",
        *ways(found),
        "",
        "The recommended configuration needs:",
        *parts(best.memory),
    ]


def _data(ask: Ask) -> "Data | None":
    """The data that were given as a flag; None without the flag, and of rollouts, whose rows the model writes."""
    if "dataset" not in ask.typed or ask.recipe.rolls_out:
        return None
    announce_wait(f"counting the tokens of {ask.recipe.dataset}")
    return read_training_data(ask.recipe, ask.shape.vocab_size, ask.shape.tower is not None)


def _lengths(data: "Data | None", ask: Ask, option: Option) -> Lengths | None:
    """Count the tokens of ``data``, as rows of ``option``."""
    if data is None:
        return None
    recipe = ask.recipe.model_copy(update={"per_device_train_batch_size": option.workload.rows})
    return measure_lengths(data, recipe, option.workload.num_data_ranks)
