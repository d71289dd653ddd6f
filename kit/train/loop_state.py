"""The state of the training loop that a checkpoint stores, besides weights and optimiser, for an exact resume."""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from kit.train.loss_scaling import INITIAL, next_scale

if TYPE_CHECKING:
    from kit.config.settings.evaluation import EvalSettings
    from kit.train.step import StepResult

RECENT_STEPS, FEWEST_LOSSES = 50, 10  # the largest and the smallest number of losses for the median
OF_THE_DATA = ("eval_tokens", "eval_lengths/")  # how metrics begin that are the same at each evaluation


@dataclass(frozen=True)
class LossSpike:
    """A loss far above the median of the last finite losses."""

    ratio: float  # loss / median
    num_steps: int  # number of losses in the median


@dataclass
class LoopState:
    """The state of the training loop. Its fields are keys of a checkpoint's ``state.json``."""

    step: int = 0  # optimiser steps done
    feed: dict[str, Any] = field(default_factory=dict)  # state of the feed at the last save
    evaluated_step: int = -1  # step of the last evaluation; -1: none
    first_evaluation: dict[str, float] = field(default_factory=dict)  # metrics of the first evaluation
    first_evaluated_step: int = -1  # step of the first evaluation; -1: none, or of a version that did not store it
    last_evaluation: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    best: dict[str, Any] = field(default_factory=dict)  # of the best evaluation: step, and the metric that was followed
    stale_evaluations: int = 0  # number of evaluations in a row that did not improve enough for early stopping
    nonfinite_steps: int = 0  # number of steps in a row that were skipped; one that overflowed in fp16 does not count
    loss_scale: float = INITIAL  # of the next step; the loss is scaled with fp16 only
    good_steps: int = 0  # since loss_scale last changed
    overflows: int = 0  # number of steps of the whole run that were skipped since gradients overflowed in fp16
    recent_losses: list[float] = field(default_factory=list)  # of the last RECENT_STEPS finite steps
    tokens_seen: int = 0  # of all steps so far, over all ranks, without padding
    tracker_id: str = ""  # of the run in trackers; the same for all its starts
    seconds: float = 0.0  # duration of the run, without the time between starts and steps that a kill undid

    def __post_init__(self) -> None:
        self.start_clock()

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> "LoopState":
        """Create it from what ``record`` returned, in this version of the kit or an earlier one."""
        names = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def record(self) -> dict[str, Any]:
        """Return the values for ``state.json``."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return values | {"seconds": self.elapsed_seconds}

    def start_clock(self) -> None:
        """Begin to count seconds now. ``seconds`` of earlier starts are kept."""
        self._began = time.perf_counter() - self.seconds

    @property
    def elapsed_seconds(self) -> float:
        """The duration of the run so far, as described at ``seconds``."""
        return time.perf_counter() - self._began

    def end_step(self, step: int, result: "StepResult", spike_ratio: float) -> LossSpike | None:
        """Count ``step`` (from 1) as done.

        Args:
            spike_ratio: a loss above this multiple of the median of recent losses is a spike; 0: never.

        Returns:
            The spike, or None if the loss is none.
        """
        self.step = step
        if result.loss_scale is not None and (result.is_finite or result.overflowed):
            self.loss_scale, self.good_steps = next_scale(result.loss_scale, self.good_steps, result.overflowed)
        if result.overflowed:
            self.overflows += 1
            return None
        self.nonfinite_steps = 0 if result.is_finite else self.nonfinite_steps + 1
        num_losses = len(self.recent_losses)
        median = statistics.median(self.recent_losses) if num_losses >= FEWEST_LOSSES else math.inf
        if not result.is_finite:
            return None
        self.recent_losses = [*self.recent_losses, result.loss][-RECENT_STEPS:]
        # A median of 0, as of a memorised dataset, has no multiples.
        is_spike = bool(spike_ratio) and median > 0 and result.loss > spike_ratio * median
        return LossSpike(result.loss / median, num_losses) if is_spike else None

    def end_evaluation(self, step: int, metrics: dict[str, float], metric: str = "eval_loss") -> bool:
        """Store the metrics of the evaluation after ``step`` steps. Returns whether it is the best so far.

        Args:
            metric: the key of what is compared, ``metric_for_best_model``: of a loss less is better, of any other more.
                If the evaluations before followed another one, this evaluation is the best so far. If ``metrics`` lack
                it, as they lack the margin if all answers have the same label, or it is not finite, no evaluation is
                the best, and none counts for early stopping.
        """
        sign = -1 if metric == "eval_loss" else 1
        # A metric that is not a number is never the best: each comparison with it is false.
        value = metrics.get(metric, math.nan)
        gain = sign * value - sign * self.best.get(metric, -sign * math.inf)
        self.stale_evaluations = 0 if gain > 0 else self.stale_evaluations + math.isfinite(value)
        self.evaluated_step, self.last_evaluation = step, metrics
        if not self.first_evaluation:
            self.first_evaluation, self.first_evaluated_step = metrics, step
        is_best = gain > 0
        if is_best:
            self.best = {"step": step, metric: metrics[metric]}
        return is_best

    def follows_another(self, metric: str) -> bool:
        """Whether the evaluations so far followed another metric, so that nothing is known of the best by this one."""
        return bool(self.best) and metric not in self.best

    @property
    def current_evaluation(self) -> dict[str, float]:
        """The metrics of the evaluation after the last step done; empty if there was none."""
        return self.last_evaluation if self.evaluated_step == self.step else {}

    def early_stop_reason(self, settings: "EvalSettings", total_steps: int) -> str:
        """Return why the run ends before its last step: its patience is exhausted. Else an empty string."""
        if settings.early_stopping_patience is None or self.stale_evaluations < settings.early_stopping_patience:
            return ""
        metric = settings.metric_for_best_model
        # At its last step the run ends anyway, and may go on with more steps. What was counted of another metric
        # before a resume says nothing.
        if self.step >= total_steps or self.follows_another(metric):
            return ""
        change = "fall" if metric == "eval_loss" else "rise"
        return f"{metric} did not {change} in the last {self.stale_evaluations} evaluations"
