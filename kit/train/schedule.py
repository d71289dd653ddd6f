"""The learning-rate schedule, and the steps after which a run evaluates and saves.

All of it is a pure function of the settings, the data and the step, so a resume needs no saved state.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.config.settings.evaluation import EvalSettings
    from kit.config.settings.optimisation import OptimSettings
    from kit.config.settings.output import OutputSettings
    from kit.data.feed.data import Data


def count_steps(fraction_or_count: float, total_steps: int) -> int:
    """Return the number of steps that a setting means. Below 1 it is a fraction of all steps, rounded up."""
    return math.ceil(fraction_or_count * total_steps) if fraction_or_count < 1 else int(fraction_or_count)


def learning_rate(settings: "OptimSettings", peak: float, step: int, total_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0.

    The rate grows linearly to ``peak`` during warm-up. What follows is the ``lr_scheduler_type``; for
    linear and cosine shapes, a step after the last one would have the lowest rate:

    - ``constant``, and ``constant_with_warmup`` is the same: it stays there.
    - ``linear``, ``cosine``: it falls to 0 along a line, or along half a cosine.
    - ``cosine_with_min_lr``: it falls to ``min_lr_rate`` of the peak.
    - ``warmup_stable_decay``: it stays there, and falls along half a cosine to ``min_lr_rate`` of the peak (default 0)
      in the last ``lr_decay_steps``, or in all steps after warm-up if these are fewer (Hu et al. 2024,
      https://arxiv.org/abs/2404.06395, section 4).
    - ``inverse_sqrt``: it falls with the root of the number of steps; without warm-up, as if 10,000 had gone before.

    The formulas are those of ``transformers.get_scheduler``, but for all shapes warm-up begins at 0 and is one step
    ahead: step 0 has the rate ``peak / warmup``, not 0, so that it is not wasted.
    """
    kind = settings.lr_scheduler_type
    warmup = count_steps(settings.warmup_steps, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind in ("constant", "constant_with_warmup"):
        return peak
    if kind == "inverse_sqrt":
        timescale = warmup or 10_000
        return peak / math.sqrt((step - warmup + timescale) / timescale)
    num_decaying = max(1, total_steps - warmup)
    if kind == "warmup_stable_decay":
        num_decaying = min(num_decaying, count_steps(settings.lr_decay_steps or 0.0, total_steps))
    progress = min(1.0, max(0.0, (step - (total_steps - num_decaying)) / num_decaying))
    shape = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    lowest = settings.min_lr_rate or 0.0
    return peak * (lowest + (1 - lowest) * shape)


def schedule_change(settings: "OptimSettings", peak: float, step: int, was: int, now: int) -> list[str]:
    """Return a line for a run that continues with ``step`` and other learning rates; an empty list if none differs.

    Args:
        step: the next step, counted from 0.
        was: the optimiser steps of the whole run at the last save.
        now: those of the run from here on.
    """
    steps = range(step, now) if was != now else ()
    if all(learning_rate(settings, peak, each, was) == learning_rate(settings, peak, each, now) for each in steps):
        return []
    before, after = (learning_rate(settings, peak, step, total) for total in (was, now))
    return [
        f"warning: the run had {was} steps and now has {now}, so its learning rates change: step {step + 1} has "
        f"{after:.3g} instead of {before:.3g}"
    ]


def evaluation_is_due(settings: "EvalSettings", data: "Data", total_steps: int, step: int) -> bool:
    """Return whether an evaluation is due after ``step`` of ``total_steps``; 0 is before the first step."""
    if step in (0, total_steps):
        return step > 0 or settings.eval_on_start
    return _is_due(settings.eval_strategy, count_steps(settings.eval_steps, total_steps), data, step)


def save_is_due(settings: "OutputSettings", data: "Data", total_steps: int, step: int) -> bool:
    """Return whether a checkpoint is due after ``step`` of ``total_steps``, besides those at the end and by time."""
    return _is_due(settings.save_strategy, count_steps(settings.num_save_steps, total_steps), data, step)


def _is_due(strategy: str | None, num_steps: int, data: "Data", step: int) -> bool:
    """Whether ``step`` steps are a multiple of ``num_steps``, or with ``epoch`` complete an epoch (or several)."""
    if strategy != "epoch":
        return num_steps > 0 and step % num_steps == 0
    return data.whole_epochs_after(step) > data.whole_epochs_after(step - 1)
