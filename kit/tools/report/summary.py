"""The summary of a run: what a reader wants to know first."""

from collections.abc import Mapping

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
        found["training loss"] = _change([row["loss"] for row in training])
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
    if training and "tokens_seen" in training[-1]:
        found["tokens seen"] = f"{training[-1]['tokens_seen']:,}"
    return found


def tokens_per_second(run: ReportedRun) -> float | None:
    """Return the median speed of one process, without the first logged step; None before the first one."""
    speeds = [row["tokens_per_second"] for row in run.training if "tokens_per_second" in row]
    return _median([speed / run.strategy.num_processes for speed in speeds])


def median_utilisation(run: ReportedRun) -> float | None:
    """Return the median model FLOPs utilisation, without the first logged step; None if it is unknown."""
    values = [run.utilisation(row) for row in run.training]
    return _median([value for value in values if value is not None])


def definition_list(named: Mapping[str, str]) -> str:
    """Return named texts as an HTML list (``dl``)."""
    items = "".join(
        f"<div{' class=wide' if len(text) > _SHORT else ''}><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>"
        for name, text in named.items()
    )
    return f"<dl class=facts>{items}</dl>"


def _median(values: list[float]) -> float | None:
    steady = sorted(values[1:] or values)
    return steady[len(steady) // 2] if steady else None


def _change(values: list[float], form: str = ".4f") -> str:
    return f"{values[0]:{form}} → {values[-1]:{form}}" if len(values) > 1 else f"{values[0]:{form}}"
