"""What a short sweep over learning rates found, as a table and a suggestion.

Promises: a suggestion is a range, and says when the best rate is at the end of those that were tried. All rates of a
sweep trained on the same batches, so their losses are compared step by step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit.run.record import read_metrics

_TAIL = 0.25  # share of the steps at the end whose losses are averaged
# A rate is as good as the best if its loss is higher by at most these shares of the fall of the best one's loss, and of
# that loss: where losses fall to a thousandth, the first alone would make all rates equal.
_OF_FALL, _OF_LOSS = 0.03, 0.1


@dataclass(frozen=True, eq=False)
class Trial:
    """The first steps of a run with one learning rate."""

    rate: float
    losses: np.ndarray  # [N], of each step with an update; the first one is from before any update
    stopped_at: int = 0  # the step whose loss or gradient norm was not finite; 0: none
    eval_loss: float = math.nan  # after the last step; NaN without evaluation data

    @classmethod
    def read(cls, rate: float, folder: Path) -> "Trial":
        """Read what the run in ``folder`` logged. Raises ``UserError`` if its metrics cannot be read."""
        rows = read_metrics(folder)
        losses = [row["loss"] for row in rows if "loss" in row and math.isfinite(row["loss"])]
        stopped = [row["step"] for row in rows if "nonfinite" in row]
        evaluated = [row["eval_loss"] for row in rows if "eval_loss" in row]
        return cls(rate, np.array(losses), *stopped[:1] or [0], *evaluated[-1:])

    @property
    def tail(self) -> np.ndarray:
        """The losses of the last steps."""
        return self.losses[-max(1, round(_TAIL * len(self.losses))) :]

    @property
    def final_loss(self) -> float:
        """The mean of ``tail``; infinite if the run stopped before."""
        return math.inf if self.stopped_at or not len(self.losses) else float(self.tail.mean())


@dataclass(frozen=True)
class Sweep:
    """The trials of a sweep, the lowest rate first."""

    trials: Sequence[Trial]
    num_steps: int

    @property
    def is_evaluated(self) -> bool:
        """Whether each trial that ended has an evaluation loss, which is compared then."""
        ended = [trial.eval_loss for trial in self.trials if not trial.stopped_at]
        return bool(ended) and all(map(math.isfinite, ended))

    def score(self, trial: Trial) -> float:
        """The loss by which ``trial`` is compared; infinite if it stopped."""
        return trial.eval_loss if self.is_evaluated and not trial.stopped_at else trial.final_loss

    def went_up(self, trial: Trial) -> bool:
        """Whether the loss rose: it is not finite, or above that of the first step and of the lowest rate."""
        end = trial.final_loss
        return math.isinf(end) or end > max(trial.losses[0], self.trials[0].final_loss)

    @property
    def best(self) -> Trial | None:
        """The trial with the lowest score; None if all went up."""
        good = [trial for trial in self.trials if not self.went_up(trial)]
        return min(good, key=self.score, default=None)

    def is_as_good(self, trial: Trial, best: Trial) -> bool:
        """Whether the difference to the best trial is small, or within the noise of the last steps."""
        differences = trial.tail - best.tail  # of the same batches
        noise = 2 * float(differences.std()) / math.sqrt(len(differences))
        score = self.score(best)
        small = min(_OF_FALL * (float(best.losses[0]) - score), _OF_LOSS * score)
        return self.score(trial) - score <= max(noise, small)

    @property
    def range(self) -> list[Trial]:
        """The best trial and those that are as good, the lowest rate first; empty if all went up."""
        best = self.best
        if best is None:
            return []
        return [trial for trial in self.trials if not self.went_up(trial) and self.is_as_good(trial, best)]

    def rows(self) -> list[dict[str, Any]]:
        """Return the table: a row for each rate."""
        rows, good = [], self.range
        for trial in self.trials:
            row = {"learning rate": f"{trial.rate:g}", f"training loss, last {_TAIL:.0%}": _text(trial.final_loss)}
            if self.is_evaluated:
                row["evaluation loss"] = _text(self.score(trial))
            if trial.stopped_at:
                row[""] = f"not finite at step {trial.stopped_at}"
            elif self.went_up(trial):
                row[""] = "went up"
            else:
                row[""] = "lowest" if trial is self.best else "as good" if trial in good else ""
            rows.append(row)
        return rows

    def suggestion(self) -> list[str]:
        """Return lines for the user: which rates to take, which to try, and what the sweep cannot show."""
        rates = [f"{trial.rate:g}" for trial in self.range]
        if not rates:
            return ["the loss went up with every rate: try --rates that are lower"]
        measure = "evaluation" if self.is_evaluated else "training"
        found = f"{rates[0]} to {rates[-1]}" if len(rates) > 1 else rates[0]
        lines = [f"after {self.num_steps} steps the {measure} loss is lowest with {found}"]
        if self.best is self.trials[-1]:
            lines.append("    the highest rate that was tried: add higher --rates")
        elif self.best is self.trials[0]:
            lines.append("    the lowest rate that was tried: add lower --rates")
        lower = "begin at the lower end" if len(rates) > 1 else "try the next lower one too"
        lines.append(f"    short runs favour rates that are too high for a long run: {lower} (docs/rates.md)")
        return lines


def _text(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else ""
