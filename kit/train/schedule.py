"""Learning rate as a pure function of the step: nothing to save, nothing to resume."""

import math
from typing import Literal


def warmup_length(warmup_steps: float, total_steps: int) -> int:
    """Warm-up in steps; a value below 1 is a share of all steps, rounded up."""
    return math.ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)


def learning_rate(
    step: int,
    total_steps: int,
    peak: float,
    warmup_steps: float,
    kind: Literal["constant", "linear", "cosine"],
) -> float:
    """Rate of 0-based ``step``: a linear climb to ``peak``, then constant, or down to 0 after the last step.

    The climb starts above 0 (``peak / warmup`` at step 0), so that no step is wasted. The same shapes as
    ``transformers.get_scheduler``, one step further on.
    """
    warmup = warmup_length(warmup_steps, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return peak * (1 - progress) if kind == "linear" else peak * 0.5 * (1 + math.cos(math.pi * progress))
