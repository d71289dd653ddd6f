"""``kit verify-resume``: check that a killed run resumes exactly, with these flags, on this machine.

It starts ``recipes/finetune.py`` three times with a few steps: one run without interruption, one that is killed, and
the same command again.

Promises: the result is "exact" only if steps were done after a checkpoint was loaded and every bit is equal. No process
and no temporary file is left behind, not even after Ctrl-C, SIGTERM, or where the terminal is closed.
"""

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kit.config.command_line import read_command_line, read_flags
from kit.config.recipe import Recipe
from kit.run.record import read_run
from kit.system.console import Parser, show, show_error
from kit.system.errors import Problem, UserError, raise_if
from kit.system.visible import joined
from kit.tools.verify_resume.compare_runs import compare_runs
from kit.tools.verify_resume.run_script import SET, ScriptFailed, run_script

HELP = "kill a short run with your flags, resume it, and compare bit for bit"
DEFAULT_STEPS = 6
MAX_EVAL_SAMPLES = 4
ATTEMPTS = 3

USAGE = f"""usage: kit verify-resume [--recipe R] [--config C] [--steps N] [--kill_after K] [--flag ...]

Run N steps; run them again and kill every process once the checkpoint of step K is complete; type the same command
again; compare losses, gradient norms, learning rates, evaluations and final weights bit for bit.

  --steps N        optimiser steps of each run (default: {DEFAULT_STEPS})
  --kill_after K   step of the checkpoint to resume from, 1 to N - 1 (default: half of N)

Takes the flags of recipes/finetune.py, but sets output_dir, max_steps, checkpoints, logging_steps, trackers,
resume_from_checkpoint, overwrite_output_dir and evaluation (after each step, on at most {MAX_EVAL_SAMPLES} samples,
without generation or early stopping) itself; a note lists the flags that it overrides.
Exit status: 0 exact, 1 not exact, 2 if you can fix something."""


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    steps: int  # of each run
    kill_after: int  # step of the checkpoint after which the run is killed
    flags: dict[str, str]  # flags of the script, without output_dir
    overridden: list[str]  # the user's flags that this command overrides


def run(argv: list[str]) -> int:
    """Run the three runs, print the comparison, and return the exit status.

    Returns:
        0 if the result is exact; 1 if it is not, or if a run failed; 2 if a run was refused because of its settings.

    Raises:
        UserError: flags are wrong, or the runs end before they can be killed.
    """
    options = read_options(argv)
    if options.overridden:
        show(f"note: this command sets these flags itself: {', '.join(options.overridden)}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the script, in a session of its own, would go on
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    with TemporaryDirectory(prefix="kit-") as folder:
        try:
            return _verify(options, Path(folder))
        except ScriptFailed as error:
            show_error(f"\n{error}")
            return error.status


def read_options(argv: list[str]) -> Options:
    """Parse the flags of this command and of the script. Raises ``UserError`` with all problems; writes nothing."""
    parser = Parser(prog="kit verify-resume", add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--kill_after", "--kill-after", type=int)
    own, words = parser.parse_known_args(argv)
    given, problems, _ = read_flags(words)
    kill_after = own.steps // 2 if own.kill_after is None else own.kill_after
    if not 0 < kill_after < own.steps:
        problems.append(Problem("--kill_after", f"step {kill_after} of {own.steps}", "a step before the last"))
    of_steps = {"max_steps": str(own.steps), "save_strategy": "steps", "save_steps": str(kill_after)}
    left_out = ("output_dir", "dry_run")
    flags = {name: value for name, value in given.items() if name not in left_out} | SET | of_steps
    words = [f"--{name}={value}" for name, value in flags.items()]
    request = read_command_line(words)
    raise_if([*problems, *request.problems])
    recipe = request.recipe
    assert recipe is not None
    if recipe.save_only_model:
        found = "true: its checkpoints hold weights only, and no run continues from them"
        raise UserError("save_only_model", found, fix="--save_only_model false")
    if recipe.has_evaluation:
        flags |= {
            "eval_strategy": "steps",
            "eval_steps": "1",
            "early_stopping_patience": "none",
            "max_eval_samples": str(min(recipe.max_eval_samples or MAX_EVAL_SAMPLES, MAX_EVAL_SAMPLES)),
        }
    overridden = [name for name, value in given.items() if name in Recipe.model_fields and flags.get(name) != value]
    return Options(own.steps, kill_after, flags, overridden)


def _verify(options: Options, folder: Path) -> int:
    whole, continued = folder / "uninterrupted", folder / "continued"
    checkpoints = continued / "checkpoints"
    show(f"1 of 3: {options.steps} steps without interruption")
    run_script({**options.flags, "output_dir": str(whole)}, folder)
    recipe, strategy = read_run(whole / "run.json")  # what the run took, of which some settings were auto
    show(f"    {strategy.describe(recipe, recipe)}")
    shutil.rmtree(whole / "checkpoints")  # no longer needed, and large

    show(f"2 of 3: the same, killed when the checkpoint of step {options.kill_after} is complete")
    again = {**options.flags, "output_dir": str(continued)}
    for _ in range(ATTEMPTS):
        was_killed = run_script(again, folder, until=_manifest(checkpoints, options.kill_after).is_file)
        if was_killed and not _manifest(checkpoints, options.steps).is_file():
            break
        show("    all steps were done before it could be killed: trying again")
        shutil.rmtree(continued)
    else:
        found = f"{options.steps} are done before the run can be killed, {ATTEMPTS} times in a row"
        raise UserError("--steps", found, "more steps", "more --steps")

    show("3 of 3: the command of the killed run again")
    run_script(again, folder)
    comparison = compare_runs(whole, continued)
    show(joined(["", *comparison.table, "", *comparison.verdict.splitlines()]))
    nondeterministic = strategy.device != "cpu" and not recipe.deterministic
    if comparison.result == "differs" and nondeterministic:
        show("    -> GPU kernels may be nondeterministic: try --deterministic true")
    return 0 if comparison.result == "exact" else 1


def _manifest(checkpoints: Path, step: int) -> Path:
    """The manifest of a checkpoint: it exists if and only if the checkpoint is complete."""
    return checkpoints / f"step-{step:08d}" / "manifest.json"
