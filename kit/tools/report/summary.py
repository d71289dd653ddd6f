"""The summary of a run: what a reader wants to know first, its results; then how it was done."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kit.tools.report.measures import EXACT, LOSS, measures_in
from kit.tools.report.page import escaped
from kit.tools.report.remarks import peak_bytes, predicted_bytes
from kit.tools.report.runs import ReportedRun
from kit.tools.report.words import after, clock

_GIB = 2**-30
_SHORT = 24  # characters of a text that fit into a narrow box


class Result(NamedTuple):
    """A result of a run, as texts."""

    name: str
    value: str
    note: str  # of which steps it is


def results_of(run: ReportedRun) -> list[Result]:
    """Return what a run reached, before and after, the most important first."""
    found = []
    for measure in measures_in(run.evaluations):
        key, rows = measure.key, [row for row in run.evaluations if measure.key in row]
        best = measure.best(rows)
        if not best:
            continue
        notes = [_from_to([row["step"] for row in rows])]
        if measure is EXACT:
            notes += [f"of {rows[-1]['num_answers']:,} answers"] if "num_answers" in rows[-1] else []
        elif len(rows) > 2:
            where = f"{measure.extreme}: {measure.text(best[key])} {after(best['step'])}"
            notes.append(f"the last is the {measure.extreme}" if best is rows[-1] else where)
        ends_of_rows = (rows[0], rows[-1])[-len(rows) :]
        text = " → ".join(measure.text(row[key]) for row in ends_of_rows)
        found.append(Result(measure.name, text, ", ".join(notes)))
    losses = run.training.values("loss")
    if len(losses):
        steps = run.training.column("step")[~np.isnan(run.training.column("loss"))]
        ends = [0, -1][: len(losses)]
        named = " → ".join(f"step {steps[i]:,.0f}" for i in ends)
        found.append(Result("training loss", " → ".join(LOSS.text(losses[i]) for i in ends), named))
    return found


def results_list(results: Sequence[Result]) -> str:
    """Return results as an HTML list (``dl``), large."""
    items = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd><dd class=note>{escaped(note)}</dd></div>"
        for name, value, note in results
    )
    return f"<dl class=results>{items}</dl>" if results else ""


def run_facts(run: ReportedRun) -> dict[str, str]:
    """Return how a run was done: texts by name, such as ``hardware`` and ``strategy``."""
    strategy, recipe = run.strategy, run.recipe
    found = {"begun (UTC)": clock(run.starts[0]["time"])} if run.starts else {}
    hardware = f"CPU, {strategy.num_threads} threads a process" if strategy.device == "cpu" else strategy.device
    found["hardware"] = f"{strategy.num_processes} x {hardware}" if strategy.device != "cpu" else hardware
    found["strategy"] = strategy.describe(recipe)
    found["model"] = f"{recipe.model_name_or_path} ({recipe.method})"
    if run.objective_text:
        found["objective"] = run.objective_text
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
    seen = run.training.values("tokens_seen")
    if len(seen):
        found["tokens seen"] = f"{seen[-1]:,.0f}"
    found["folder"] = str(run.folder.absolute())
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


def _from_to(steps: Sequence[int]) -> str:
    return f"{after(steps[0])} → {after(steps[-1])}" if len(steps) > 1 else after(steps[0])
