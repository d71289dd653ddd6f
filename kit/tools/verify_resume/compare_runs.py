"""Compare two finished runs bit for bit, from their output folders."""

import filecmp
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kit.run.record import METRICS_FILE, RUN_FILE, read_metrics
from kit.system.durable import read_small
from kit.system.errors import UserError, counted
from kit.tools.text_table import text_table

COMPARED_KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss")

Row = dict[str, Any]  # a line of metrics.jsonl


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    result: Literal["exact", "differs", "not continued"]
    table: list[str]  # a line for each step, and one for the final weights
    verdict: str  # the result in words, for the user


def compare_runs(whole: Path, continued: Path) -> Comparison:
    """Compare the output folders of an uninterrupted run and of a run that was killed and resumed.

    Raises:
        UserError: no step is logged.
    """
    kept = json.loads(read_small(continued / RUN_FILE))["starts"][-1]["step"]
    of_whole, of_continued = _values(read_metrics(whole)), _values(read_metrics(continued))
    if not of_whole:
        raise UserError(str(whole / METRICS_FILE), "no step is logged", "the metrics of a run")
    differing, rows_shown = [], []
    for step in sorted(of_whole.keys() | of_continued.keys()):
        a, b = of_whole.get(step, {}), of_continued.get(step, {})
        names = [name for name in COMPARED_KEYS if repr(a.get(name)) != repr(b.get(name))]  # repr knows every bit
        differing += [step] if names else []
        losses = {run: f"loss {row.get('loss', 'missing')}" for run, row in (("uninterrupted", a), ("continued", b))}
        rows_shown.append({"step": str(step), **losses, "difference": ", ".join(names) or "none"})
    table = text_table(rows_shown)
    weights = "equal" if _same_weights(whole / "final", continued / "final") else "different"
    table.append(f"final weights: {weights}")
    num_steps = max(of_whole)
    if not kept or kept >= num_steps:
        reason = "started again at step 1" if not kept else "had no steps left"
        return Comparison("not continued", table, f"not continued: the run {reason}")
    if not differing and weights == "equal":
        steps = counted(num_steps - kept, "step")
        return Comparison("exact", table, f"exact: {steps} after the kill and the final weights are equal bit for bit")
    first = f"from step {differing[0]} on" if differing else "in the final weights alone"
    if differing and differing[0] <= kept:
        first += ", which is before the kill: these steps were not resumed, so two runs of this command differ anyway"
    return Comparison("differs", table, f"differs {first}")


def _values(rows: list[Row]) -> dict[int, Row]:
    """The compared values of each step, from its training row and the evaluation after it."""
    values: dict[int, Row] = {}
    for row in rows:
        values.setdefault(row["step"], {}).update({name: row[name] for name in COMPARED_KEYS if name in row})
    return values


def _same_weights(whole: Path, continued: Path) -> bool:
    """Whether the safetensors files in two folders are the same, byte for byte."""
    one, other = ([path.name for path in sorted(folder.glob("*.safetensors"))] for folder in (whole, continued))
    return bool(one) and one == other and not any(filecmp.cmpfiles(whole, continued, one, shallow=False)[1:])
