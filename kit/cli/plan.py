"""``kit plan``: predict what fits a GPU and how long it takes, before a GPU is rented."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from kit.memory.fit import FOR_TEACHER
from kit.system.console import announce_wait, show
from kit.system.visible import joined
from kit.tools.plan.lengths import Lengths, measure_lengths, read_training_data
from kit.tools.plan.request import OWN, PlanRequest, read_plan_request
from kit.tools.plan.search import Option, options, recommend
from kit.tools.plan.shown_plan import command, configurations, gib, longest_rows, own_config, parts, rows_of, time_lines

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
    request = read_plan_request(argv)
    show(joined([*_plan(request), "", NOTE]))
    return 0


def _plan(request: PlanRequest) -> list[str]:
    """The recommended configuration with its memory, time and command, and the table of all configurations."""
    base, recipe = request.workload, request.recipe
    data = _data(request)
    if data and base.shape.tower:
        base = replace(base, image_tokens=data.train.image_tokens(recipe.max_length if recipe.packing else None))
    found = options(base, request.gpu, recipe.global_batch_size, request.only)
    best = recommend(found, recipe.method)
    where = f"{base.num_gpus} x {request.gpu.name}, {gib(request.gpu.memory)} each"
    where += f", host memory {gib(request.gpu.host)}" if math.isfinite(request.gpu.host) else ""
    where += "" if request.gpu.bf16 else "; in fp16, because it has no bf16"
    title = f"{request.shape.name}, {request.shape.num_parameters:,} parameters; {rows_of(base)}"
    if best is None:
        none = "Nothing fits. Try a smaller --max_length, a smaller model, or more GPUs or host memory."
        return [title, where, "", *configurations(found), "", f"{none} {FOR_TEACHER}." if request.teacher else none]
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
        *time_lines(best, recipe.max_steps, request.price, _lengths(data, request, best)),
        "",
        "    " + command(best, request),
    ]
    if note := own_config(own):
        lines.append(f"    {note}")
    return [
        *lines,
        *longest_rows(best),
        "",
        *configurations(found),
        "",
        "The recommended configuration needs:",
        *parts(best.memory),
    ]


def _data(request: PlanRequest) -> "Data | None":
    """The data that were given as a flag; None without the flag, and of rollouts, whose rows the model writes."""
    if "dataset" not in request.typed or request.recipe.rolls_out:
        return None
    announce_wait(f"counting the tokens of {request.recipe.dataset}")
    return read_training_data(request.recipe, request.shape.vocab_size, request.shape.tower is not None)


def _lengths(data: "Data | None", request: PlanRequest, option: Option) -> Lengths | None:
    """Count the tokens of ``data``, as rows of ``option``."""
    if data is None:
        return None
    recipe = request.recipe.model_copy(update={"per_device_train_batch_size": option.workload.rows})
    return measure_lengths(data, recipe, option.workload.num_data_ranks)
