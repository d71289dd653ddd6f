"""The summary of a run: what a reader wants to know first."""

from collections.abc import Mapping, Sequence

import numpy as np

from kit.tools.report.page import escaped
from kit.tools.report.remarks import peak_bytes, predicted_bytes
from kit.tools.report.runs import ReportedRun, duration
from kit.tools.report.words import clock

_GIB = 2**-30
_SHORT = 24  # characters of a text that fit into a narrow box


def run_summary(run: ReportedRun) -> dict[str, str]:
    """Return the summary of a run: texts by name, such as ``status`` and ``duration``."""
    training = run.training
    strategy = run.strategy
    recipe = run.recipe
    found = {"status": run.status}
    if run.seconds is not None:
        found["duration"] = duration(run.seconds)
    if run.starts:
        found["begun (UTC)"] = clock(run.starts[0]["time"])
    hardware = f"CPU, {strategy.num_threads} threads a process" if strategy.device == "cpu" else strategy.device
    found["hardware"] = f"{strategy.num_processes} x {hardware}" if strategy.device != "cpu" else hardware
    found["strategy"] = strategy.describe(recipe)
    found["model"] = f"{recipe.model_name_or_path} ({recipe.method})"
    if training:
        found["training loss"] = _change(training.values("loss"))
    for key, name in (("eval_loss", "evaluation loss"), ("eval_exact_match", "exact match")):
        values = [row[key] for row in run.evaluations if key in row]
        if values:
            found[name] = _change(values, ".1%" if key == "eval_exact_match" else ".4f")
    speed = tokens_per_second(run)
    if speed is not None:
        found[f"tokens per second per {run.device}"] = f"{speed:,.0f}"
    utilisation = median_utilisation(run)
    if utilisation:
        found["model FLOPs utilisation"] = f"{utilisation:.1%}"
    peak = peak_bytes(run)
    predicted = predicted_bytes(run)
    if peak is not None:
        found["peak memory of rank 0"] = f"{peak * _GIB:.1f} GiB"
        if predicted:
            found["peak memory of rank 0"] += f", {predicted * _GIB:.1f} predicted"
    seen = training.values("tokens_seen")
    if len(seen):
        found["tokens seen"] = f"{seen[-1]:,.0f}"
    return found


def tokens_per_second(run: ReportedRun) -> float | None:
    """Return the median speed of one process, without the first logged step; None before the first one."""
    median = _median_speed(run)
    return None if median is None else median / run.strategy.num_processes


def median_utilisation(run: ReportedRun) -> float | None:
    """Return the median model FLOPs utilisation, without the first logged step; None if it is unknown."""
    median, per_speed = _median_speed(run), run.utilisation_per_speed
    return None if median is None or per_speed is None else median * per_speed


def definition_list(named: Mapping[str, str]) -> str:
    """Return named texts as an HTML list (``dl``)."""
    items = "".join(
        f"<div{' class=wide' if len(text) > _SHORT else ''}><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>"
        for name, text in named.items()
    )
    return f"<dl class=facts>{items}</dl>"


def _median_speed(run: ReportedRun) -> float | None:
    """The median of tokens per second of all processes, without the first logged step."""
    speeds = run.training.values("tokens_per_second")
    steady = np.sort(speeds[1:] if len(speeds) > 1 else speeds)
    return float(steady[len(steady) // 2]) if len(steady) else None


def _change(values: Sequence[float] | np.ndarray, form: str = ".4f") -> str:
    return f"{values[0]:{form}} → {values[-1]:{form}}" if len(values) > 1 else f"{values[0]:{form}}"
