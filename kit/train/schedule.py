"""What is due when: the learning rate of each step, and the steps after which the run evaluates and saves.

All of it is a pure function of the recipe, the data and the step, so a resume needs no saved state.
"""

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.data.feed.stream import Stream
    from kit.data.open import Data


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


def evaluation_is_due(recipe: "Recipe", data: "Data | Stream", step: int) -> bool:
    """Return whether the recipe wants an evaluation after ``step`` steps; 0 is before the first step."""
    if step in (0, data.total_steps(recipe)):
        return step > 0 or recipe.eval_on_start
    return _is_due(recipe.eval_strategy, recipe.eval_steps, data, step)


def save_is_due(recipe: "Recipe", data: "Data | Stream", step: int) -> bool:
    """Return whether the recipe wants a checkpoint after ``step`` steps, from 1; the one at the end apart."""
    return _is_due(recipe.save_strategy, recipe.save_steps, data, step)


def _is_due(strategy: str | None, num_steps: int, data: "Data | Stream", step: int) -> bool:
    """Whether ``step`` steps are a multiple of ``num_steps``, or with ``epoch`` complete an epoch (or several)."""
    if strategy != "epoch":
        return num_steps > 0 and step % num_steps == 0
    return data.whole_epochs_after(step) > data.whole_epochs_after(step - 1)
