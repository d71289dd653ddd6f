"""``kit rates``: the first steps of a run with several learning rates, beside each other.

Promises: each rate is an ordinary run of ``recipes/finetune.py``, on the same batches; nothing is written into the
real run's folder; a finished rate is never run again, so the same command continues a sweep that was stopped. No
process is left behind, not even after Ctrl-C.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kit import interrupt
from kit.cli.starts import SET, ScriptFailed, run_script, workplace
from kit.config.command_line import read_command_line, read_flags
from kit.console import Parser, announce_wait, show, show_error
from kit.durable import read_small, write_text
from kit.errors import Problem, UserError, raise_if
from kit.run.record import RUN_FILE, read_metrics
from kit.visible import joined

if TYPE_CHECKING:
    from kit.preflight import Preflight

HELP = "try several learning rates for a few steps, and compare the losses"
FACTORS = (0.1, 0.3, 1, 3, 10)  # of the run's own rate
FEWEST_STEPS, WARMUPS = 50, 3  # of a trial by default: so many steps, or so many times the warm-up
MOST_EVAL_SAMPLES = 256
SWEEP_FILE = "sweep.json"

USAGE = f"""usage: kit rates [--recipe R] [--config C] [--rates 1e-5,3e-5,...] [--sweep_steps N] [--flag value ...]

Try several learning rates for a few steps, and compare the losses: the same data in the same order, the same
seed and warm-up, then a constant rate. Suggest a range.

  --rates R,R,...    learning rates (default: {", ".join(f"{factor:g}" for factor in FACTORS)} times the run's own)
  --sweep_steps N    steps of each (default: {FEWEST_STEPS}, or {WARMUPS} times the warm-up if that is more)

Takes the flags of recipes/finetune.py. The sweep has a folder of its own, OUTPUT_DIR-rates; weights are deleted as soon
as a rate is done. Ctrl-C ends it; the same command continues with the rate that was not finished, and more --rates are
added to those that are done. docs/rates.md says what a short sweep cannot show.
Exit status: 0 done, 1 a run failed, 2 if you can fix something."""


def run(argv: list[str]) -> int:
    """Run the trials that are not done, print the comparison, and return the exit status.

    Raises:
        UserError: flags, model or data are wrong, or the folder holds another sweep.
    """
    if {"-h", "--help"} & set(argv):
        show(USAGE)
        return 0
    parser = Parser(prog="kit rates", add_help=False, allow_abbrev=False)
    parser.add_argument("--rates", type=numbers)
    parser.add_argument("--sweep_steps", "--sweep-steps", type=int)
    own, rest = parser.parse_known_args(argv)
    words, problems, notes = read_flags(rest)
    request = read_command_line([f"--{name}={value}" for name, value in words.items()])
    problems += request.problems
    if own.rates and not 0 < own.rates[0] <= own.rates[-1] <= 1:
        problems.append(Problem("--rates", f"found {own.rates}", "rates above 0, at most 1: --rates 1e-5,3e-5,1e-4"))
    if own.sweep_steps is not None and own.sweep_steps < 2:
        problems.append(Problem("--sweep_steps", f"found {own.sweep_steps}", "a whole number from 2"))
    raise_if(problems)
    if notes:
        show(joined(notes))
    assert request.recipe is not None
    from kit.strategy.launch import resolve_config

    recipe = resolve_config(request)[0]
    if recipe.rolls_out:
        found = f"{recipe.objective}, whose loss says nothing about a rate"
        raise UserError(Problem("objective", found, fix="compare the rewards of short runs: kit report RUN RUN"))
    of_run = (float(f"{recipe.peak_learning_rate * factor:.2g}") for factor in FACTORS)
    rates = own.rates or [rate for rate in of_run if rate <= 1]
    announce_wait(f"opening the tokenizer and config of {recipe.model_name_or_path}, and the data")
    from kit import preflight

    interrupt.raise_on_ctrl_c()
    checked = preflight.check(recipe)
    steps, warmup = _length(checked, own.sweep_steps)
    flags = _flags(words, checked, steps, warmup)
    folder = Path(f"{recipe.output_dir}-rates")
    known = _open(folder, flags, checked)
    done = {rate: folder / f"{rate:g}" for rate in {*known, *rates} if _is_done(folder / f"{rate:g}", steps)}
    missing = [rate for rate in rates if rate not in done]
    show(f"rates: {', '.join(f'{rate:g}' for rate in missing) or 'all are done'}")
    show(f"    {steps} steps of {recipe.global_batch_size} samples, {warmup} of them warm-up, on the same batches")
    show(joined([f"    the run itself has {checked.total_steps:,} steps; folder {folder}"]))
    with workplace() as temporary:
        for number, rate in enumerate(missing, 1):
            target = folder / f"{rate:g}"
            shutil.rmtree(target, ignore_errors=True)  # it was stopped
            show(f"{number} of {len(missing)}: learning rate {rate:g}")
            try:
                run_script({**flags, "output_dir": str(target), "learning_rate": repr(rate)}, temporary)
            except ScriptFailed as error:
                if not _has_diverged(target):
                    show_error(f"\n{error}")
                    return error.status
                show("    the loss is no longer finite: this rate is done")
            for name in ("checkpoints", "final"):  # large, and nobody continues from them
                shutil.rmtree(target / name, ignore_errors=True)
            done[rate] = target
    from kit.tools.rates import Sweep, Trial
    from kit.tools.text_table import text_table

    sweep = Sweep([Trial.read(rate, done[rate]) for rate in sorted(done)], steps)
    curves = f"curves: kit report {shlex.quote(str(folder))}/*/"
    show(joined(["", *text_table(sweep.rows()), "", *sweep.suggestion(), curves]))
    return 0


def numbers(text: str) -> list[float]:
    """Read ``--rates``, the lowest first."""
    return sorted({float(rate) for rate in text.split(",")})


def _length(checked: "Preflight", asked: int | None) -> tuple[int, int]:
    """The steps of a trial, and those of them that are warm-up."""
    from kit.train.schedule import count_steps

    total = checked.total_steps
    warmup = count_steps(checked.recipe.warmup_steps, total)
    steps = min(total, asked or max(FEWEST_STEPS, WARMUPS * warmup))
    if steps <= warmup and steps < total:
        found = f"{steps}, of which all are warm-up: no trial would reach its rate"
        raise UserError(Problem("--sweep_steps", found, f"more than {warmup}"))
    return steps, warmup


def _flags(words: dict[str, str], checked: "Preflight", steps: int, warmup: int) -> dict[str, str]:
    """The flags of each trial, without rate and folder."""
    recipe = checked.recipe
    own = SET | {
        "max_steps": str(steps),
        "save_strategy": "no",
        "save_steps": "0",
        "save_only_model": "true",
        "keep_best": "false",
        "max_nonfinite_steps": "0",
    }
    if steps < checked.total_steps:
        own |= {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": str(warmup)}
        # Only other schedules have these.
        own |= {key: "none" for key in ("min_lr_rate", "lr_decay_steps") if getattr(recipe, key) is not None}
    if recipe.has_evaluation:
        own |= {
            "eval_strategy": "no",
            "eval_steps": "0",
            "eval_on_start": "false",
            "early_stopping_patience": "none",
            "max_eval_samples": str(min(recipe.max_eval_samples or MOST_EVAL_SAMPLES, MOST_EVAL_SAMPLES)),
        }
    left_out = {"output_dir", "learning_rate", "dry_run", "num_train_epochs"}
    return {name: value for name, value in words.items() if name not in left_out} | own


def _open(folder: Path, flags: dict[str, str], checked: "Preflight") -> list[float]:
    """Create the folder of the sweep, or check that it holds this one. Returns the rates that were begun in it."""
    about = {**flags, "the data": str(getattr(checked.data, "fingerprint", ""))}
    path = folder / SWEEP_FILE
    before = json.loads(read_small(path)) if path.exists() else {}
    begun = [file.parent.name for file in folder.glob(f"*/{RUN_FILE}")]
    found = ""
    if begun and (other := [key for key in {**before, **about} if before.get(key) != about.get(key)]):
        found = f"{folder} holds runs with other values of {', '.join(other)}"
    elif not before and folder.exists() and any(folder.iterdir()):
        found = f"{folder} exists and holds no sweep"
    if found:
        raise UserError(Problem("output_dir", found, "the folder of this sweep, or none", "another --output_dir"))
    # Also over what a first trial that was refused left: it binds no next command.
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(about, indent=1) + "\n")
    return [float(name) for name in begun]


def _is_done(folder: Path, steps: int) -> bool:
    if not (folder / RUN_FILE).is_file():
        return False
    finished = json.loads(read_small(folder / RUN_FILE)).get("finished_steps") == steps
    return finished or _has_diverged(folder)


def _has_diverged(folder: Path) -> bool:
    return (folder / RUN_FILE).is_file() and any("nonfinite" in row for row in read_metrics(folder))
