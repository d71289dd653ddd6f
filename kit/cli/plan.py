"""``kit plan``: what fits a GPU, how long it takes, and which command to type; before a GPU is rented."""

import json
import math

from kit.config.hints import recipe_names
from kit.config.validation import load_recipe
from kit.console import announce_wait, show
from kit.errors import Problem, raise_if
from kit.tools.plan.ask import OWN, Ask, Question, read_ask
from kit.tools.plan.hardware import GPUS, USUAL
from kit.tools.plan.lengths import Lengths, measure_lengths, read_training_data
from kit.tools.plan.models import find_shape
from kit.tools.plan.search import MOST_GPUS, Option, options, recommend, smallest
from kit.tools.plan.table import command, gib, in_short, own_config, parts, record, rows_of, table, time_lines, ways
from kit.visible import joined

HELP = "what fits a GPU, how long it takes, and the command to type"
USAGE = "usage: kit plan [--recipe R | --model M] [--gpu G] [--gpus N] [--flag value ...]"
NOTE = "Planned by formulas, not measured: docs/planning.md says from what."


def run(argv: list[str]) -> int:
    """Print the plan. Raises ``UserError`` with all problems."""
    if {"-h", "--help"} & set(argv):
        lines = [f"  --{name:<6} {meaning}" for name, meaning in OWN.items()]
        show(joined([USAGE, "", f"{HELP}. Without a model: all recipes.", "", *lines, ""]))
        show("Each key of a recipe is a flag too, as in recipes/finetune.py.")
        return 0
    ask = read_ask(argv)
    question = ask.question
    if question is None:
        show(joined([*_all_recipes(ask), "", NOTE]))
        return 0
    raise_if([Problem("--gpu", "none is named, and this machine has none", "as --gpu rtx4090")] if not ask.gpu else [])
    assert ask.gpu is not None
    recipe = question.recipe
    found = options(ask.workload(recipe, question.shape), ask.gpu, recipe.global_batch_size, question.only)
    best = recommend(found, recipe.method)
    if ask.as_json:
        plan = {
            "fits": best is not None and best.workload.method == recipe.method,
            "model": question.shape.name,
            "num_parameters": question.shape.num_parameters,
            "ways": [record(option) for option in found],
            "recommended": best and record(best),
            "command": best and command(best, question),
            "own_config": best and own_config(best.workload),
        }
        show(json.dumps(plan, indent=1))
        return 0
    show(joined([*_plan(ask, question, found, best), "", NOTE]))
    return 0


def _plan(ask: Ask, question: Question, found: list[Option], best: Option | None) -> list[str]:
    """The recommended way with its memory, time and command, and the table of all ways."""
    assert ask.gpu is not None
    base = ask.workload(question.recipe, question.shape)
    where = f"{base.num_gpus} x {ask.gpu.name}, {gib(ask.gpu.memory)} each"
    where += f", host memory {gib(ask.gpu.host)}" if math.isfinite(ask.gpu.host) else ""
    where += "" if ask.gpu.bf16 else "; in float32, since it has no bf16"
    title = f"{question.shape.name}, {question.shape.num_parameters:,} parameters; {rows_of(base)}"
    if best is None:
        none = "Nothing fits. A smaller --max_length, a smaller model, or more GPUs or host memory."
        return [title, where, "", *ways(found), "", none]
    own = best.workload
    lines = [title, where, "", f"Recommended: {own.method} with {own.config}"]
    if own.method != question.recipe.method:
        lines[-1] += f", since {question.recipe.method} does not fit"
    lines += [*time_lines(best, question.recipe.max_steps, ask.price, _lengths(question, best)), ""]
    lines += ["    " + command(best, question)]
    if note := own_config(own):
        lines.append(f"    {note}")
    return [*lines, "", *ways(found), "", "The recommended way takes:", *parts(best.memory)]


def _lengths(question: Question, option: Option) -> Lengths | None:
    """Count the tokens of the data that were given as a flag, as rows of ``option``; None without the flag."""
    if "dataset" not in question.typed:
        return None
    announce_wait(f"counting the tokens of {question.recipe.dataset}")
    data = read_training_data(question.recipe, question.shape.vocab_size)
    recipe = question.recipe.model_copy(update={"per_device_train_batch_size": option.workload.rows})
    return measure_lengths(data, recipe, option.workload.num_gpus)


def _all_recipes(ask: Ask) -> list[str]:
    """A table of all recipes: on how few of each GPU they fit, and with which config."""
    gpus = [ask.gpu] if ask.gpu else [GPUS[name] for name in USUAL]
    counts = [ask.num_gpus] if ask.num_gpus else [2**power for power in range(MOST_GPUS.bit_length())]
    known = {name: load_recipe(name) for name in recipe_names()}
    shapes = {name: find_shape(recipe.model_name_or_path) for name, recipe in known.items()}
    rows = []
    for name in sorted(known, key=lambda name: shapes[name].num_parameters):
        base, batch = ask.workload(known[name], shapes[name]), known[name].global_batch_size
        rows.append([name, *(in_short(smallest(base, batch, [(gpu, num) for num in counts])) for gpu in gpus)])
    return [
        *table(["", *(gpu.name for gpu in gpus)], [["recipe", *(gib(gpu.memory) for gpu in gpus)], *rows]),
        "The fewest GPUs that fit. *: with gradient checkpointing. offload: fsdp_offload, weights in host memory.",
        "How long it takes, and what to type: kit plan --recipe R --gpu G",
    ]
