"""A run as its report needs it: ``run.json``, and the numbers of ``metrics.jsonl``. It can be read at any time.

Promises: numbers are kept as columns of 16 bytes a value, so a million lines take megabytes. A metric that is no
number, as of a damaged file, is left out.
"""

import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kit.config.recipe import Recipe
from kit.run.record import METRICS_FILE, RUN_FILE, is_evaluation, metrics_rows, read_run
from kit.strategy.topology import ActualStrategy
from kit.system import lock
from kit.system.durable import open_regular, read_small
from kit.system.errors import UserError
from kit.tasks.preference import spec as preference

Row = dict[str, Any]  # a line of metrics.jsonl
MOST_ODD = 100  # steps whose samples are kept
ACCURACY = f"eval_{preference.ACCURACY.key}"
_LEAST, _MOST = 1e-150, 1e150  # of a number that a run writes


@dataclass
class ReportedRun:
    """A run with its record and its metrics, as they were when they were read.

    ``kit.Run``, which Python code gets, reads the files again each time; this one is for pages.
    """

    folder: Path
    recipe: Recipe
    strategy: ActualStrategy
    record: dict[str, Any]  # run.json
    is_at_work: bool  # whether a process trains it now
    # The numbers of metrics.jsonl by key: step, value, step, value, ... Keys of evaluations begin with ``eval_``.
    numbers: dict[str, "array[float]"] = field(default_factory=dict)
    answered: list[Row] = field(default_factory=list)  # the first and the last evaluation with generated answers
    details: Row = field(default_factory=dict)  # of a classifier's last evaluation, see ``Evaluation.details``
    rollouts: list[Row] = field(default_factory=list)  # the first and the last step with rollout samples
    answer_metrics: list[str] = field(default_factory=list)  # keys of the metrics of answers
    odd_steps: list[Row] = field(default_factory=list)  # skipped steps and loss spikes; MOST_ODD with samples
    steps_done: int = 0
    seconds: float = 0.0  # of the run so far, without the time between its starts

    def append(self, row: Row) -> None:
        """Append a line of the metrics."""
        self.steps_done = max(self.steps_done, row["step"])
        self.seconds = max(self.seconds, finite_number(row.get("seconds")) or 0.0)
        if is_evaluation(row):
            if self.recipe.declared.has_reference and not row["step"]:
                # The policy equals its reference model: all rewards are 0, apart from rounding.
                row = {**row, ACCURACY: None}
            if isinstance(intervals := row.get("intervals"), dict):
                self.answer_metrics = list(dict.fromkeys([*self.answer_metrics, *intervals]))
        if isinstance(row.get("details"), dict):
            self.details = row["details"]
        for name, kept in (("answers", self.answered), ("rollout", self.rollouts)):
            answers = row.get(name)
            if answers and isinstance(answers, list) and all(isinstance(each, dict) for each in answers):
                kept[1:] = [row]
        for key, value in row.items():
            if (number := finite_number(value)) is not None:
                self.numbers.setdefault(key, array("d")).extend((row["step"], number))
        if "nonfinite" in row or "loss_spike" in row:
            has_room = len(self.odd_steps) < MOST_ODD
            self.odd_steps.append(row if has_room else {key: each for key, each in row.items() if key != "samples"})

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.absolute().name

    def points(self, key: str) -> np.ndarray:
        """Return the steps that have a value, with it. [N, 2], float64"""
        return np.array(self.numbers.get(key, ()), np.float64).reshape(-1, 2)

    def values(self, key: str) -> np.ndarray:
        """Return the values alone. [N]"""
        return self.points(key)[:, 1]

    @property
    def status(self) -> str:
        """The progress of the run, and how it ended."""
        total, early = self.record.get("total_steps"), self.record.get("ended_early")
        text = f"{self.steps_done:,} of {total} steps" + (f", {early}" if early else "")
        if self.record.get("finished_steps"):
            return f"finished: {text}"
        if self.is_at_work:
            return f"running: {text}"
        state = "not finished" if self.record.get("interrupted") is None else "stopped"
        return f"{state}: {text}; the same command continues it"

    def best(self, key: str) -> tuple[int, float] | None:
        """The step of the best evaluation and its value; None without any. Less is better of a loss, else more."""
        points = self.points(key)
        if not len(points):
            return None
        step, value = points[points[:, 1].argmin() if key == "eval_loss" else points[:, 1].argmax()]
        return int(step), float(value)


def read_reported_run(folder: Path) -> ReportedRun:
    """Read the run in an ``output_dir``. Raises ``UserError`` if there is none, or if its record is damaged."""
    recipe, strategy = read_run(folder / RUN_FILE)
    record = json.loads(read_small(folder / RUN_FILE))
    if not all(isinstance(record.get(key), dict) for key in ("data", "versions")):
        expected = "the folder of a run, or a file in it"
        raise UserError(str(folder / RUN_FILE), "no record of a run (no data or versions)", expected)
    try:
        open_regular(folder / METRICS_FILE).close()
    except FileNotFoundError:
        pass  # before the first step
    except OSError as error:
        raise UserError(str(folder / METRICS_FILE), f"cannot be read ({error.strerror})") from None
    try:
        lock.check_free(folder)
        is_at_work = False
    except UserError:
        is_at_work = True
    run = ReportedRun(folder, recipe, strategy, record, is_at_work)
    for row in metrics_rows(folder):
        run.append(row)
    return run


def finite_number(value: Any) -> float | None:
    """Return ``value`` if it is a finite number of a size that charts can compute with; else None."""
    if type(value) not in (int, float) or not abs(value) < _MOST:
        return None
    return float(value) if abs(value) > _LEAST else 0.0
