"""What a checkpoint keeps of the loop, besides weights and optimiser: enough to go on as if nothing had happened."""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.train.step import StepResult

RECENT_STEPS, FEWEST_LOSSES = 50, 10  # losses that a spike is compared with: at most, at least


@dataclass(frozen=True)
class LossSpike:
    """A loss far above the median of the last ``num_steps`` finite ones."""

    ratio: float
    num_steps: int


@dataclass
class LoopState:
    """Where the loop stands. Its fields are the keys in a checkpoint's ``state.json``."""

    step: int = 0  # optimiser steps done
    feed: dict[str, Any] = field(default_factory=dict)  # of the feed, after the last step that was saved
    evaluated_step: int = -1  # the last one; -1 for none
    first_evaluation: dict[str, float] = field(default_factory=dict)  # its metrics
    last_evaluation: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)  # step and eval_loss of the lowest
    nonfinite_steps: int = 0  # skipped in a row
    recent_losses: list[float] = field(default_factory=list)
    tracker_id: str = ""
    seconds: float = 0.0  # of the run, without the time between two starts and what a kill undid

    def __post_init__(self) -> None:
        self.start_clock()

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> "LoopState":
        """From what ``record`` gave, in this version or an earlier one."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def record(self) -> dict[str, Any]:
        """For ``state.json``."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"seconds": self.elapsed_seconds}

    def start_clock(self) -> None:
        """Seconds count from here on."""
        self._began = time.perf_counter() - self.seconds

    @property
    def elapsed_seconds(self) -> float:
        """Since the run began; see ``seconds``."""
        return time.perf_counter() - self._began

    def end_step(self, step: int, result: "StepResult", spike_ratio: float) -> LossSpike | None:
        """Count 1-based ``step`` as done. Returns how far its loss is above the usual, if ``spike_ratio`` times it.

        ``spike_ratio``: 0 never looks.
        """
        self.step = step
        self.nonfinite_steps = 0 if result.is_finite else self.nonfinite_steps + 1
        num_losses = len(self.recent_losses)
        usual = statistics.median(self.recent_losses) if num_losses >= FEWEST_LOSSES else math.inf
        if not result.is_finite:
            return None
        self.recent_losses = [*self.recent_losses, result.loss][-RECENT_STEPS:]
        is_spike = bool(spike_ratio) and result.loss > spike_ratio * usual
        return LossSpike(result.loss / usual, num_losses) if is_spike else None

    def end_evaluation(self, step: int, metrics: dict[str, float]) -> bool:
        """Count the evaluation after ``step`` steps as done. Returns whether its loss is the lowest so far."""
        self.evaluated_step, self.last_evaluation = step, metrics
        self.first_evaluation = self.first_evaluation or metrics
        is_best = metrics["eval_loss"] < self.best.get("eval_loss", math.inf)
        if is_best:
            self.best = {"step": step, "eval_loss": metrics["eval_loss"]}
        return is_best
