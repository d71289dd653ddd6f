"""A run for its report: the record, the metrics without damaged values, and what follows from them.

It needs only ``run.json`` and ``metrics.jsonl``, so it can be read at any time, also of a run that is still running or
was killed.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kit import lock
from kit.config.recipe import Recipe
from kit.errors import Problem, UserError
from kit.run.record import METRICS_FILE, RUN_FILE, read_metrics, read_run
from kit.strategy.topology import ActualStrategy
from kit.tools.plan.hardware import gpu_of

Row = dict[str, Any]  # a line of metrics.jsonl
_TEXTS = ("nonfinite", "objective")
_ANSWER = ("prompt", "reference", "text", "exact")  # keys of an answer in the metrics


@dataclass(frozen=True)
class ReportedRun:
    """A run with its record and its metrics, as they were when they were read.

    ``kit.Run``, which Python code gets, reads the files anew each time; this one is for pages.
    """

    folder: Path
    recipe: Recipe
    strategy: ActualStrategy
    record: dict[str, Any]  # run.json
    rows: list[Row]
    is_at_work: bool  # whether a process trains it now

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.absolute().name

    @cached_property
    def training(self) -> list[Row]:
        """The rows of steps with an update."""
        return [row for row in self.rows if "loss" in row]

    @cached_property
    def evaluations(self) -> list[Row]:
        """The rows of evaluations."""
        return [row for row in self.rows if "eval_loss" in row]

    @property
    def odd_steps(self) -> list[Row]:
        """The rows that list the samples of a step: it was skipped, or its loss was a spike."""
        return [row for row in self.rows if "samples" in row and ("nonfinite" in row or "loss_spike" in row)]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run, as ``kit.run.starts`` lists them; empty of a run of a version that did not."""
        listed = self.record.get("starts")
        return [each for each in listed if _is_start(each)] if isinstance(listed, list) else []

    @property
    def steps_done(self) -> int:
        """The last step in the metrics; 0 without any."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run; 0 if unknown."""
        return _whole(self.record.get("total_steps"))

    @property
    def seconds(self) -> float | None:
        """The duration of the run so far, without the time between its starts."""
        return max((row["seconds"] for row in self.rows if "seconds" in row), default=None)

    @property
    def device(self) -> str:
        """What one process computes on, as a word for a title: ``GPU``, or ``process`` on a CPU."""
        return "process" if self.strategy.device == "cpu" else "GPU"

    @property
    def objective(self) -> str:
        """The class of another objective than the supervised loss; else empty."""
        return next((row["objective"] for row in reversed(self.rows) if "objective" in row), "")

    @property
    def has_one_loss(self) -> bool:
        """Whether ``loss`` and ``eval_loss`` are the same measure, so that they fit into one chart."""
        has_router_loss = self.recipe.router_aux_loss_coef or any("router_loss" in row for row in self.rows)
        return not self.objective and not has_router_loss

    @property
    def status(self) -> str:
        """How far the run came, and how it ended, in words."""
        finished, total = _whole(self.record.get("finished_steps")), self.total_steps
        of_total = f" of {total:,}" if total else ""
        if finished:
            early = self.record.get("ended_early")
            reason = f", before its last one: {early}" if early else ""
            return f"finished after {finished:,} steps{reason}"
        if self.record.get("interrupted") is not None:
            return f"stopped by a signal after {self.steps_done:,}{of_total} steps; the same command continues it"
        if self.is_at_work:
            return f"running: {self.steps_done:,}{of_total} steps so far{self._time_left()}"
        done = f"not finished: {self.steps_done:,}{of_total} steps"
        return f"{done}, and no process is at work; the same command continues it"

    def _time_left(self) -> str:
        training = [row for row in self.training if "seconds" in row]
        if len(training) < 2 or not self.total_steps:
            return ""
        first, last = training[max(len(training) - 50, 0)], training[-1]
        speed = (last["seconds"] - first["seconds"]) / max(last["step"] - first["step"], 1)
        return f", about {duration(speed * (self.total_steps - last['step']))} left"

    def utilisation(self, row: Row) -> float | None:
        """Model FLOPs utilisation at a step: the model's own FLOP/s / the peak of all devices; None if unknown.

        It counts forward and backward pass without recomputation, and is unknown for a GPU that the kit does not know.
        """
        plan = self.record.get("plan")
        per_token = _number(plan.get("operations_per_token")) if isinstance(plan, dict) else None
        tflops = gpu_of(self.strategy.device).tflops if self.strategy.mixed_precision == "bf16" else None
        if not tflops or not per_token or "tokens_per_second" not in row:
            return None
        peak = tflops * 1e12
        return row["tokens_per_second"] * per_token / (peak * self.strategy.num_processes)


def read_reported_run(folder: Path) -> ReportedRun:
    """Read the run in an ``output_dir``. Raises ``UserError`` if there is none, or if its record is damaged."""
    recipe, strategy = read_run(folder / RUN_FILE)
    record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    data = record.get("data")
    has_data = isinstance(data, dict) and isinstance(data.get("train"), dict) and isinstance(data.get("sources"), list)
    if not has_data or not isinstance(record.get("versions"), dict):
        expected = "the folder of a run, or what lies in it"
        raise UserError(Problem(str(folder / RUN_FILE), "no record of a run (no data or versions)", expected))
    try:
        (folder / METRICS_FILE).open("rb").close()
    except FileNotFoundError:
        pass  # before the first step
    except OSError as error:
        raise UserError(Problem(str(folder / METRICS_FILE), f"cannot be read ({error.strerror})")) from None
    try:
        lock.check_free(folder)
        is_at_work = False
    except UserError:
        is_at_work = True
    return ReportedRun(
        folder, recipe, strategy, record, [_whole_values(row) for row in read_metrics(folder)], is_at_work
    )


def duration(seconds: float) -> str:
    """Return a duration in words: ``45 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _whole_values(row: Row) -> Row:
    """The row without values of a type that no run writes there, as of a damaged file."""
    return {key: value for key, value in row.items() if key == "step" or _is_whole(key, value)}


def _is_whole(key: str, value: Any) -> bool:
    if key in _TEXTS:
        return isinstance(value, str)
    if key == "samples":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if key == "answers":
        return isinstance(value, list) and all(isinstance(item, dict) and item.keys() >= {*_ANSWER} for item in value)
    return _number(value) is not None


def _is_start(value: Any) -> bool:
    is_known = isinstance(value, dict) and isinstance(value.get("changed"), list)
    return is_known and isinstance(value.get("step"), int) and isinstance(value.get("time"), str)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
