"""``kit verify-resume``: does a killed run continue exactly, with these flags, on this machine?

Three real starts of ``recipes/finetune.py``, shrunk to a few steps: one left alone, one killed without warning, and
the same command again. Promises: "exact" is said only where steps were done after a checkpoint was loaded and every
bit is equal; no process and no temporary file outlives the command, Ctrl-C included.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from kit.cli.compare_runs import compare
from kit.config.command_line import FLAGS, read_command_line, read_flags, show
from kit.config.other_kits import FOREIGN
from kit.config.recipe import RECIPES, Recipe, Request
from kit.errors import Problem, UserError, did_you_mean, raise_if
from kit.model.locate import read_metrics
from kit.strategy.accelerator import describe

SCRIPT = RECIPES / "finetune.py"
DEFAULT_STEPS = 6
MAX_EVAL_SAMPLES = 4
OWN_FLAGS = ("steps", "kill_after", "keep")
ATTEMPTS = 3
SECONDS_BETWEEN_LOOKS = 0.002  # a step of a tiny model takes ten times as long

USAGE = f"""usage: kit verify-resume [--recipe R] [--config C] [--steps N] [--kill_after K] [--keep FOLDER] [--flag ...]

Run N steps; run them again and kill every process once the checkpoint of step K is complete; type the same command
again; compare losses, gradient norms, learning rates, evaluations and final weights bit for bit.

  --steps N        optimiser steps of each run (default: {DEFAULT_STEPS})
  --kill_after K   step of the checkpoint to continue from, 1 to N - 1 (default: half of N)
  --keep FOLDER    new folder to run in and to keep (default: one in $TMPDIR, deleted)

Takes the flags of recipes/finetune.py, and decides itself about output_dir, max_steps, save_steps, logging_steps,
trackers, resume_from_checkpoint, overwrite_output_dir, and evaluation (after each step, on {MAX_EVAL_SAMPLES} samples
at most, without generation); flags that say otherwise are named in a note.
Exit status: 0 exact, 1 not, 2 where you can mend something."""


class RunFailed(Exception):
    """A start of the script ended by itself with ``status``, never 0, and said ``text``."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


@dataclass(frozen=True)
class Plan:
    """What to do, as the command line says."""

    steps: int
    kill_after: int
    keep: Path | None
    flags: dict[str, str]  # of the script, without output_dir
    passed_over: list[str]  # flags that say otherwise
    request: Request


def verify_resume(argv: list[str]) -> int:
    """The command. Returns 0 if exact, 1 if not or if a run failed, 2 if a run was refused.

    Raises:
        UserError: flags that are wrong, or runs that end too early to be killed.
    """
    if {"-h", "--help"} & set(argv):
        show(USAGE)
        return 0
    plan = read_plan(argv)
    if plan.passed_over:
        show(f"note: decided here, not by your flags: {', '.join(plan.passed_over)}")
    with _workplace() as temporary:
        folder = plan.keep or temporary
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(Problem("--keep", f"{folder}: {error.strerror}", "a folder to write to")) from None
        try:
            return _verify(plan, folder, temporary)
        except RunFailed as error:
            print(f"\n{error}", file=sys.stderr)
            return error.status


def read_plan(argv: list[str]) -> Plan:
    """Flags of this command and of the script. Raises ``UserError`` with everything wrong; writes nothing."""
    flags, problems = read_flags(argv)
    given = dict(flags)
    for name in [name for name in given if name not in {*OWN_FLAGS, *FLAGS, *FOREIGN}]:
        hint = did_you_mean(name, OWN_FLAGS)
        if hint and hint == did_you_mean(name, [*OWN_FLAGS, *FLAGS]):  # else the script's own hint is nearer
            problems.append(Problem(f"--{name}", "unknown flag", fix=hint))
            del flags[name]

    def number(name: str, default: int, least: int, most: float) -> int:
        text = flags.pop(name, str(default))
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        found = f"found {text!r}" if text else "no value"
        expected = f"whole number from {least}" + (f" to {most}" if most < math.inf else "")
        problems.append(Problem(f"--{name}", found, expected))
        return default

    steps = number("steps", DEFAULT_STEPS, 2, math.inf)
    kill_after = number("kill_after", steps // 2, 1, steps - 1)
    keep = flags.pop("keep", None)
    folder = None
    if keep is not None:
        folder = Path(os.path.expanduser(keep)).absolute()
        if not keep or (os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir()))):
            problems.append(Problem("--keep", f"{keep} is there already" if keep else "no value", "a new folder"))
    if flags.pop("dry_run", "false") != "false":
        problems.append(Problem("--dry_run", "a dry run has no steps to verify", fix="leave it out"))
    flags.pop("output_dir", None)
    flags |= {
        "max_steps": str(steps),
        "save_steps": str(kill_after),
        "logging_steps": "1",
        "predict_with_generate": "false",
        "report_to": "none",
        "resume_from_checkpoint": "auto",
        "overwrite_output_dir": "false",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    request = read_command_line(words)
    raise_if([*problems, *request.problems])
    recipe = request.recipe
    assert recipe is not None
    if recipe.has_evaluation:
        flags |= {
            "eval_steps": "1",
            "max_eval_samples": str(min(recipe.max_eval_samples or MAX_EVAL_SAMPLES, MAX_EVAL_SAMPLES)),
        }
    passed_over = [name for name, value in given.items() if name in Recipe.model_fields and flags.get(name) != value]
    return Plan(steps, kill_after, folder, flags, passed_over, request)


def _verify(plan: Plan, folder: Path, temporary: Path) -> int:
    whole, continued = folder / "uninterrupted", folder / "continued"
    checkpoints = continued / "checkpoints"
    starts = _Starts(plan, folder, temporary)

    starts.run(f"{plan.steps} steps without interruption", whole)
    info = json.loads((whole / "run.json").read_text(encoding="utf-8"))
    assert plan.request.recipe is not None
    show(f"    {describe(info['strategy'], plan.request.recipe)}")
    if not plan.keep:  # of no further use, and large
        shutil.rmtree(whole / "checkpoints")

    title = f"the same, killed when the checkpoint of step {plan.kill_after} is complete"
    for _ in range(ATTEMPTS):
        if (
            starts.run(title, continued, until=_manifest(checkpoints, plan.kill_after).is_file)
            and not _manifest(checkpoints, plan.steps).is_file()
        ):
            break
        show("    all steps were done before it could be killed: once more")
        shutil.rmtree(continued)
    else:
        found = f"{plan.steps} are done before the run can be killed, {ATTEMPTS} times in a row"
        raise UserError(Problem("--steps", found, "more steps", f"--steps {4 * plan.steps}"))
    before_kill = read_metrics(continued)

    starts.run("the command of the killed run again", continued)
    comparison = compare(whole, continued, before_kill)
    show("\n".join(["", *comparison.table, "", comparison.verdict]))
    nondeterministic = info["strategy"]["device"] != "cpu" and not info["recipe"]["deterministic"]
    if comparison.result == "differs" and nondeterministic:
        show("    -> on a GPU, kernels may sum in another order each time: try --deterministic true")
    return 0 if comparison.result == "exact" else 1


def _manifest(checkpoints: Path, step: int) -> Path:
    """The file that is there if and only if the checkpoint is complete."""
    return checkpoints / f"step-{step:08d}" / "manifest.json"


class _Starts:
    """Starts of the script with the same flags, one after the other."""

    def __init__(self, plan: Plan, folder: Path, temporary: Path) -> None:
        self.flags, self.folder, self.temporary = plan.flags, folder, temporary
        self.titles: list[str] = []  # those said so far

    def run(self, title: str, output_dir: Path, until: Callable[[], bool] | None = None) -> bool:
        """Start the script and wait for its end, or kill all its processes as soon as ``until`` is true.

        Returns:
            Whether it was killed.

        Raises:
            RunFailed: it ended by itself with another status than 0.
        """
        if title not in self.titles:
            self.titles.append(title)
            show(f"{len(self.titles)} of 3: {title}")
        words = [f"--{name}={value}" for name, value in {**self.flags, "output_dir": str(output_dir)}.items()]
        log = self.folder / f"{len(self.titles)}.log"
        began = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to answer
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )
        num_shown = 0
        while True:
            status = process.poll()
            is_due = status is None and until is not None and until()
            if is_due:
                break
            num_shown = _show_new_lines(log, num_shown)
            if status is not None:
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
        kill_all(self.temporary)
        process.wait()
        _show_new_lines(log, num_shown)
        if status:
            raise _failure(len(self.titles), status, log.read_text(encoding="utf-8", errors="replace"))
        show(f"    {'killed' if is_due else 'done'} after {time.monotonic() - began:.0f} s")
        return is_due


def _show_new_lines(log: Path, start: int) -> int:
    """Show what the script said of its steps from byte ``start`` on. Returns where the next line begins."""
    if log.stat().st_size == start:
        return start
    with log.open("rb") as file:
        file.seek(start)
        text = file.read()
    text = text[: text.rfind(b"\n") + 1]
    for line in text.decode(errors="replace").splitlines():
        if line.startswith(("step ", "evaluation after ", "continuing after ", "skipping ")):
            show(f"    {line}")
    return start + len(text)


def _failure(number: int, status: int, text: str) -> RunFailed:
    """What the script itself said: a launcher turns its status 2 into 1, and talks around the one block that counts."""
    block = re.search(r"^error: (rank \d)?.*(\n[ \t]+\S.*)*", text, re.MULTILINE)
    if block:
        return RunFailed(max(status, 1) if block[1] else 2, block[0])
    crash = re.search(r"^rank \d+ failed:", text, re.MULTILINE)
    lines = text[crash.start() :].splitlines()[:60] if crash else text.splitlines()[-60:]
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return RunFailed(max(status, 1), "\n".join([*lines, f"error: run {number} of 3 {how}"]))


@contextmanager
def _workplace() -> Iterator[Path]:
    """A temporary folder; at the end it goes, and with it every process that has it as its ``TMPDIR``.

    SIGTERM and a lost terminal do what Ctrl-C does.
    """
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # `nohup` and background jobs have some of them ignored.
    handlers = {number: old for number in asking if (old := signal.getsignal(number)) != signal.SIG_IGN}

    def leave(number: int, frame: Any) -> NoReturn:
        for each in handlers:  # asking twice must not leave half of it
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    folder = Path(tempfile.mkdtemp(prefix="kit-"))
    try:
        for number in handlers:
            signal.signal(number, leave)
        yield folder
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        kill_all(folder)
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def kill_all(temporary: Path) -> None:
    """SIGKILL to every process that was started with this ``TMPDIR``; returns when they are gone.

    Launchers put ranks in sessions of their own, and ranks that lost their launcher have no parent to be found by:
    what all of them share is their environment.
    """
    stopped: set[psutil.Process] = set()
    while found := _processes(temporary) - stopped:  # one that stands still starts no other, and saves nothing
        for process in found:
            with suppress(psutil.Error):
                process.suspend()
        stopped |= found
    for process in stopped:
        with suppress(psutil.Error):
            process.kill()
    while _processes(temporary):
        time.sleep(0.01)


def _processes(temporary: Path) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("TMPDIR") == str(temporary):
                found.add(process)
    return found
