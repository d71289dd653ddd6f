"""The metrics of a run as a report needs them: a million lines take megabytes, not gigabytes.

Promises: numbers of training steps are kept as columns of 8 bytes a value. What only some lines have, such as answers,
is kept where a page shows it. A value of a type that no run writes there, as of a damaged file, is left out.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kit.run.record import metrics_rows

Row = dict[str, Any]  # a line of metrics.jsonl
FEWEST_ROWS = 20  # for a tendency
MOST_ODD = 100  # steps whose samples are kept, and listed
_TEXTS = ("nonfinite", "objective")
_ANSWER = {"prompt": str, "reference": str, "text": str, "exact": bool}  # keys of an answer in the metrics
_LEAST, _MOST = 1e-150, 1e150  # of a number that a run writes


class Columns:
    """The numbers of rows, by key."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns: dict[str, array[float]] = {}
        self._num_rows = 0
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append the numbers of a row; other values are left out."""
        for key, value in row.items():
            if (finite := finite_number(value)) is not None:
                column = self._columns.setdefault(key, array("d"))
                column.extend([math.nan] * (self._num_rows - len(column)))
                column.append(finite)
        self._num_rows += 1

    def __len__(self) -> int:
        return self._num_rows

    @property
    def keys(self) -> list[str]:
        """The keys that a row has, in the order of their first rows."""
        return list(self._columns)

    def column(self, key: str) -> np.ndarray:
        """Return the value of each row, NaN for a row without one. [N], float64"""
        found = np.array(self._columns.get(key, ()), dtype=np.float64)
        return np.pad(found, (0, self._num_rows - len(found)), constant_values=math.nan)

    def values(self, key: str) -> np.ndarray:
        """Return the values of the rows that have one. [M], float64"""
        column = self.column(key)
        return column[~np.isnan(column)]


@dataclass
class Metrics:
    """``metrics.jsonl`` of a run, as far as it has come."""

    training: Columns = field(default_factory=Columns)  # of the steps with an update
    # Of the evaluations; answers only in the first and in the last row that has some.
    evaluations: list[Row] = field(default_factory=list)
    odd_steps: list[Row] = field(default_factory=list)  # skipped, or their loss was a spike; MOST_ODD with samples
    num_rows: int = 0
    last_step: int = 0
    seconds: float | None = None  # of the whole run so far
    objective: str = ""  # the class of the last one that is named

    def append(self, row: Row) -> None:
        """Append a line."""
        row = {key: value for key, value in row.items() if key == "step" or _is_whole(key, value)}
        self.num_rows += 1
        self.last_step = max(self.last_step, row["step"])
        if "seconds" in row:
            self.seconds = max(row["seconds"], self.seconds or 0.0)
        self.objective = row.get("objective", self.objective)
        if "loss" in row:
            self.training.append(row)
        if "eval_loss" in row:
            self._append_evaluation(row)
        if "nonfinite" in row or "loss_spike" in row:
            kept = ("step", "loss", "nonfinite", "loss_spike", *(["samples"] if len(self.odd_steps) < MOST_ODD else []))
            self.odd_steps.append({key: row[key] for key in kept if key in row})

    def _append_evaluation(self, row: Row) -> None:
        answered = [each for each in self.evaluations if "answers" in each] if "answers" in row else []
        for each in answered[1:]:
            del each["answers"]
        self.evaluations.append(row)


def read_metrics_of(folder: Path) -> Metrics:
    """Read the metrics in the ``output_dir`` of a run; empty if there are none."""
    metrics = Metrics()
    for row in metrics_rows(folder):
        metrics.append(row)
    return metrics


def first_and_last(values: np.ndarray) -> tuple[float, float, int] | None:
    """Return the means of the first and of the last tenth of the values, at least 5 each, and how many these are.

    Args:
        values: [N]; for N below ``FEWEST_ROWS`` the result is None.
    """
    if len(values) < FEWEST_ROWS:
        return None
    tenth = max(len(values) // 10, 5)
    return float(values[:tenth].mean()), float(values[-tenth:].mean()), tenth


def finite_number(value: Any) -> float | None:
    """Return ``value`` if it is a finite number, and of a size that charts can compute with; else None."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return None
    return value if is_number and (value == 0 or _LEAST < abs(value) < _MOST) else None


def _is_whole(key: str, value: Any) -> bool:
    if key in _TEXTS:
        return isinstance(value, str)
    if key == "samples":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if key == "answers":
        return isinstance(value, list) and all(map(_is_answer, value))
    return finite_number(value) is not None


def _is_answer(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in _ANSWER.items())
