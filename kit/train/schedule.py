"""The learning rate, as a pure function of the step: a resume needs no saved state."""

import math
from typing import Literal


def warmup_length(warmup_steps: float, total_steps: int) -> int:
    """Return the number of warm-up steps. A value below 1 is a share of all steps, and is rounded up."""
    return math.ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)


def learning_rate(
    step: int,
    total_steps: int,
    peak: float,
    warmup_steps: float,
    kind: Literal["constant", "linear", "cosine"],
) -> float:
    """Return the learning rate of ``step``, counted from 0.

    The rate grows linearly to ``peak`` during warm-up. Then it is constant, or falls along a line or a cosine and would
    be 0 in the step after the last. The formulas are those of ``transformers.get_scheduler``, but warm-up is one step
    ahead: step 0 has the rate ``peak / warmup``, not 0, so that it is not wasted.

    Args:
        warmup_steps: as in the recipe, see ``warmup_length``.
        kind: the shape after warm-up.
    """
    warmup = warmup_length(warmup_steps, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return peak * (1 - progress) if kind == "linear" else peak * 0.5 * (1 + math.cos(math.pi * progress))
