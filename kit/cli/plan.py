"""``kit plan``: what fits a GPU, how long it takes, and which command to type; before a GPU is rented."""

import json
import math
import shlex
from dataclasses import asdict
from typing import Any

from kit.console import announce_wait, show
from kit.errors import Problem, UserError, raise_if
from kit.tools.plan.ask import OWN, SWITCHES, Ask, Question, read_ask
from kit.tools.plan.hardware import GPUS, USUAL, Gpu
from kit.tools.plan.lengths import Lengths, measure_lengths, read_training_data
from kit.tools.plan.search import (
    Option,
    fewest,
    options,
    recommend,
    strategies,
)
from kit.tools.plan.table import (
    NOTE,
    all_recipes,
    changes,
    command,
    explanation,
    fitted,
    gib,
    limits,
    needs,
    on_machines,
    parts,
    rows_of,
    start_words,
    time_lines,
    to_type,
    ways,
)
from kit.visible import joined

IN_BF16 = (
    "--optim adamw_bf16 takes less: weights and moments in bf16, rounded at random, which changes what is "
    "learned (docs/performance.md)"
)
HELP = "what fits a GPU, how long it takes, and the command to type"
USAGE = "usage: kit plan [--recipe R | --model M | --params N] [--gpu G] [--gpus N] [--flag value ...]"


def run(argv: list[str]) -> int:
    """Print the plan. Raises ``UserError`` with all problems."""
    if {"-h", "--help"} & set(argv):
        lines = [f"  --{name:<10} {meaning}" for name, meaning in (OWN | SWITCHES).items()]
        show(joined([USAGE, "", f"{HELP}. Without a model: all recipes.", "", *lines, ""]))
        show("Each key of a recipe is a flag too, as in recipes/finetune.py.")
        return 0
    ask = read_ask(argv)
    if len(ask.questions) > 1 or ask.gpu is None:
        return _show_usual(ask)
    (question,) = ask.questions
    base = ask.workload(question)
    found = options(base, ask.gpu, question.recipe.global_batch_size, question.only)
    own = [option.workload for option in found if option.workload.method == base.method]
    if not own:
        known = " or ".join(way.config for way in strategies(base))
        raise UserError(Problem("--config", f"{question.only} with {base.method} and {base.optim}", known))
    recommended = recommend(found, base.method)
    lengths = _lengths(question, recommended[0] if recommended else found[0])
    if ask.write:
        _write(ask, question, recommended)
    if "json" in ask.switches:
        show(json.dumps(_record(ask, question, found, recommended, lengths), indent=1))
        return 0
    _show_plan(ask, question, found, recommended, lengths)
    if "explain" in ask.switches:
        show(fitted(["", *explanation(recommended[0] if recommended else found[0])]))
    show(joined(["", NOTE]))
    return 0


def _show_plan(
    ask: Ask,
    question: Question,
    found: list[Option],
    recommended: tuple[Option, str] | None,
    lengths: Lengths | None,
) -> None:
    """Show all ways, and of the recommended one memory, time and the command to type."""
    assert ask.gpu is not None
    base = ask.workload(question)
    where = f"{base.num_gpus} x {ask.gpu.name}, {gib(ask.gpu.memory)} each"
    where += f", {base.num_machines} machines" if base.num_machines > 1 else ""
    where += f", host memory {gib(ask.gpu.host)}" if math.isfinite(ask.gpu.host) else ""
    where += "" if ask.gpu.bf16 else "; in float32, since it has no bf16"
    where += "; fp8 needs compute capability 8.9, and its time is taken for that of bf16" if base.fp8 else ""
    shape = question.shape
    title = f"{shape.name}, {shape.num_parameters:,} parameters; {rows_of(base)}"
    fits_in_full = any(option.fits for option in found if option.workload.method == "full")
    less = [IN_BF16] if base.method == "full" and ask.gpu.bf16 and not (base.pure_bf16 or fits_in_full) else []
    if recommended is None:
        show(fitted([title, where, "", *ways(found), "", *_nothing_fits(found), *less]))
        return
    option, reason = recommended
    lines = [title, where, "", f"Recommended: {option.workload.method} with {option.workload.config}: {reason}."]
    lines += [
        *less,
        *needs(option),
        *time_lines(option, question.recipe.max_steps, ask.price, lengths),
        "",
    ]
    show(joined([fitted(lines), *to_type(command(option, question))]))
    machines = on_machines(option)
    lines = ["", *machines] if machines else []
    show(fitted([*lines, "", "All ways:", *ways(found), "", "What takes it, in the recommended way:"]))
    show(fitted([*parts(option.memory), *limits(option.workload)]))


def _nothing_fits(found: list[Option]) -> list[str]:
    """What is missing where none of these ways fits."""
    if any(option.missing_host and option.spare >= 0 for option in found):
        return ["Nothing fits: host memory is what is missing. --async_save false keeps no copy of what is saved."]
    return ["Nothing fits. A smaller --max_length, a smaller model, or more GPUs."]


def _show_usual(ask: Ask) -> int:
    """Show on how many GPUs each recipe fits: on those that were asked for, or without any on the usual ones."""
    gpus = [ask.gpu] if ask.gpu else [GPUS[name] for name in USUAL]
    needing_gpu = set(ask.switches) - {"json"}
    if ask.write:
        needing_gpu.add("write")
    if any("dataset" in question.typed for question in ask.questions):
        needing_gpu.add("dataset")
    if any(question.only for question in ask.questions):
        needing_gpu.add("config")
    raise_if(Problem(f"--{name}", "for which GPU?", fix="add --gpu, as --gpu rtx4090") for name in sorted(needing_gpu))
    if "json" in ask.switches:
        show(json.dumps([_short_record(ask, question, gpu) for question in ask.questions for gpu in gpus], indent=1))
        return 0
    if ask.gpu is None:
        show("No GPU here: the usual ones. --gpu 24GiB, or --gpu h100, plans for one.\n")
    elif not ask.gpu.bf16:
        show(f"In float32: {ask.gpu.name} has no bf16.\n")
    show(fitted([*all_recipes(ask, gpus), "", NOTE]))
    return 0


def _lengths(question: Question, option: Option) -> Lengths | None:
    """Count the tokens of the data that were given as a flag, as rows of ``option``; None without the flag."""
    if "dataset" not in question.typed:
        return None
    announce_wait(f"counting the tokens of {question.recipe.dataset}")
    data, every = read_training_data(question.recipe, question.shape.vocab_size)
    recipe = question.recipe.model_copy(update={"per_device_train_batch_size": option.workload.rows})
    return measure_lengths(data, recipe, option.workload.num_gpus, every)


def _short_record(ask: Ask, question: Question, gpu: Gpu) -> dict[str, Any]:
    way = fewest(ask.workload(question), question.recipe.global_batch_size, gpu, ask.num_gpus)
    own = {"num_gpus": way.workload.num_gpus, "config": way.workload.config, "peak": way.memory.peak}
    return {"recipe": question.recipe_name, "gpu": gpu.name, "fits": way.fits, **own}


def _write(ask: Ask, question: Question, recommended: tuple[Option, str] | None) -> None:
    """Save the recommended recipe."""
    import yaml

    from kit import durable

    if recommended is None or ask.write is None:
        raise UserError(Problem("--write", "nothing fits, so there is nothing to save"))
    option, _ = recommended
    recipe = question.recipe
    kept = recipe.model_dump(mode="json", include=recipe.model_fields_set)
    values = kept | {"method": option.workload.method} | changes(option, question)
    header = f"# Planned for {option.workload.num_gpus} x {option.gpu.name}.\n# Launch:   "
    words = [*start_words(option.workload), "--recipe", str(ask.write)]
    launch = "\n".join([shlex.join(words), *(f"# {line}" for line in on_machines(option))])
    durable.write_text(ask.write, f"{header}{launch}\n\n" + yaml.safe_dump(values, sort_keys=False))


def _record(
    ask: Ask,
    question: Question,
    found: list[Option],
    recommended: tuple[Option, str] | None,
    lengths: Lengths | None,
) -> dict[str, Any]:
    """The plan as JSON values; sizes in bytes, times in seconds."""
    assert ask.gpu is not None

    def described(option: Option) -> dict[str, Any]:
        own = option.workload
        return {
            "method": own.method,
            "config": own.config,
            "num_gpus": own.num_gpus,
            "num_replicas": own.num_replicas,
            "per_device_train_batch_size": own.rows,
            "max_length": own.length,
            "gradient_checkpointing": own.gradient_checkpointing,
            "activation_offload": own.activation_offload,
            "fits": option.fits,
            "spare": option.spare,
            "peak": option.memory.peak,
            "moment": option.memory.moment,
            "components": option.memory.components,
            "host": option.memory.host,
            "disk": option.memory.disk,
            "largest_max_length": option.largest_length,
            "seconds_per_step": option.step and option.step.seconds,
            "passes_without_gradients": own.passes,
            "passes_share": option.step and option.step.passes_share,
            "tokens_per_second": option.step and option.step.tokens_per_second,
        }

    seconds = lengths.step_of(recommended[0].workload, ask.gpu) if lengths and recommended else None
    return {
        "fits": recommended is not None and recommended[0].workload.method == question.recipe.method,
        "model": question.shape.name,
        "num_parameters": question.shape.num_parameters,
        "gpu": {"name": ask.gpu.name, "memory": ask.gpu.memory},
        "host": ask.gpu.host if math.isfinite(ask.gpu.host) else None,
        "ways": [described(option) for option in found],
        "recommended": described(recommended[0]) if recommended else None,
        "reason": recommended[1] if recommended else "nothing fits",
        "command": command(recommended[0], question) if recommended else None,
        "on_machines": " ".join(on_machines(recommended[0])) if recommended else None,
        "data": lengths and asdict(lengths),
        "seconds_per_step_of_data": seconds and seconds.seconds,
    }
