"""A run for its report: the record, the metrics without damaged values, and what follows from them.

It needs only ``run.json`` and ``metrics.jsonl``, so it can be read at any time, also of a run that is still running or
was killed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit import lock
from kit.config.recipe import Recipe
from kit.durable import open_regular, read_small
from kit.errors import Problem, UserError
from kit.run.record import METRICS_FILE, RUN_FILE, read_run
from kit.strategy.topology import ActualStrategy
from kit.tools.plan.hardware import gpu_of
from kit.tools.report.measures import ACCURACY
from kit.tools.report.metrics import Columns, Metrics, Row, finite_number, read_metrics_of


@dataclass(frozen=True)
class ReportedRun:
    """A run with its record and its metrics, as they were when they were read.

    ``kit.Run``, which Python code gets, reads the files anew each time; this one is for pages.
    """

    folder: Path
    recipe: Recipe
    strategy: ActualStrategy
    record: dict[str, Any]  # run.json
    metrics: Metrics
    is_at_work: bool  # whether a process trains it now

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.absolute().name

    @property
    def training(self) -> Columns:
        """The numbers of the steps with an update."""
        return self.metrics.training

    @property
    def evaluations(self) -> list[Row]:
        """The rows of evaluations.

        Before training, a model equals its reference, and all rewards are 0 but for rounding: how many pairs are right
        says nothing then, and is left out.
        """
        rows = self.metrics.evaluations
        if not self.recipe.declared.has_reference:
            return rows
        return [row if row["step"] else {k: v for k, v in row.items() if k != ACCURACY.key} for row in rows]

    @property
    def odd_steps(self) -> list[Row]:
        """The rows of steps that were skipped, or whose loss was a spike."""
        return self.metrics.odd_steps

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run, as ``kit.run.starts`` lists them; empty of a run of a version that did not."""
        listed = self.record.get("starts")
        return [each for each in listed if _is_start(each)] if isinstance(listed, list) else []

    @property
    def steps_done(self) -> int:
        """The last step in the metrics; 0 without any."""
        return self.metrics.last_step

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run; 0 if unknown."""
        return _whole(self.record.get("total_steps"))

    @property
    def seconds(self) -> float | None:
        """The duration of the run so far, without the time between its starts."""
        return self.metrics.seconds

    @property
    def device(self) -> str:
        """What one process computes on, as a word for a title: ``GPU``, or ``process`` on a CPU."""
        return "process" if self.strategy.device == "cpu" else "GPU"

    @property
    def objective(self) -> str:
        """The class of another objective than the supervised loss; else empty."""
        return self.metrics.objective

    @property
    def is_of_preferences(self) -> bool:
        """Whether its data are pairs of answers, or answers with a label; then ``eval_loss`` is its objective's."""
        return self.recipe.declared.rows != "answers"

    @property
    def objective_text(self) -> str:
        """The objective with ``beta`` and what is not at its default, as ``dpo, beta 0.1``; empty for sft without any.

        Losses of preferences are comparable if this text is the same.
        """
        recipe, fields = self.recipe, type(self.recipe).model_fields
        given = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in recipe.objective_settings.items()
            if name == "beta" or value != fields[name].default
        ]
        return ", ".join([recipe.objective, *given]) if given or recipe.objective != "sft" else ""

    @property
    def has_one_loss(self) -> bool:
        """Whether ``loss`` and ``eval_loss`` are the same measure, so that they fit into one chart."""
        return (self.is_of_preferences or not self.objective) and not self.has_router_loss

    @property
    def has_router_loss(self) -> bool:
        """Whether the training loss contains the auxiliary loss of routers."""
        return bool(self.recipe.router_aux_loss_coef) or "router_loss" in self.training.keys

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
            return f"stopped after {self.steps_done:,}{of_total} steps; the same command continues it"
        if self.is_at_work:
            return f"running: {self.steps_done:,}{of_total} steps so far{self._time_left()}"
        done = f"not finished: {self.steps_done:,}{of_total} steps"
        return f"{done}, and no process is at work; the same command continues it"

    def _time_left(self) -> str:
        seconds = self.training.column("seconds")
        steps = self.training.column("step")[~np.isnan(seconds)][-50:]
        seconds = seconds[~np.isnan(seconds)][-50:]
        if len(seconds) < 2 or not self.total_steps:
            return ""
        speed = (seconds[-1] - seconds[0]) / max(steps[-1] - steps[0], 1)
        return f", about {duration(speed * (self.total_steps - steps[-1]))} left"

    @property
    def utilisation_per_speed(self) -> float | None:
        """Model FLOPs utilisation for each token per second of all devices; None if unknown.

        It is the model's own FLOP of a token / the peak FLOP/s of all devices. It counts forward and backward pass
        without recomputation, and is unknown for a GPU that the kit does not know.
        """
        plan = self.record.get("plan")
        per_token = finite_number(plan.get("operations_per_token")) if isinstance(plan, dict) else None
        tflops = gpu_of(self.strategy.device).tflops if self.strategy.mixed_precision == "bf16" else None
        if not tflops or not per_token:
            return None
        return per_token / (tflops * 1e12 * self.strategy.num_processes)


def read_reported_run(folder: Path) -> ReportedRun:
    """Read the run in an ``output_dir``. Raises ``UserError`` if there is none, or if its record is damaged."""
    recipe, strategy = read_run(folder / RUN_FILE)
    record = json.loads(read_small(folder / RUN_FILE))
    data = record.get("data")
    has_data = isinstance(data, dict) and isinstance(data.get("train"), dict) and isinstance(data.get("sources"), list)
    if not has_data or not isinstance(record.get("versions"), dict):
        expected = "the folder of a run, or what lies in it"
        raise UserError(Problem(str(folder / RUN_FILE), "no record of a run (no data or versions)", expected))
    try:
        open_regular(folder / METRICS_FILE).close()
    except FileNotFoundError:
        pass  # before the first step
    except OSError as error:
        raise UserError(Problem(str(folder / METRICS_FILE), f"cannot be read ({error.strerror})")) from None
    try:
        lock.check_free(folder)
        is_at_work = False
    except UserError:
        is_at_work = True
    return ReportedRun(folder, recipe, strategy, record, read_metrics_of(folder), is_at_work)


def duration(seconds: float) -> str:
    """Return a duration in words: ``45 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _is_start(value: Any) -> bool:
    is_known = isinstance(value, dict) and isinstance(value.get("changed"), list)
    return is_known and _is_whole(value.get("step")) and isinstance(value.get("time"), str)


def _whole(value: Any) -> int:
    return value if _is_whole(value) else 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and finite_number(value) is not None
