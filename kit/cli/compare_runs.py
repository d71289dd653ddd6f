"""Compare two finished runs bit for bit, from their output folders."""

import filecmp
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kit.run.record import read_metrics

COMPARED_KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss")

Row = dict[str, Any]  # a line of metrics.jsonl


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    result: Literal["exact", "differs", "not continued"]
    table: list[str]  # a line for each step, and one for the final weights
    verdict: str  # the result in words, for the user


def compare_runs(whole: Path, continued: Path, before_kill: list[Row]) -> Comparison:
    """Compare a run without interruption with one that was killed and continued.

    Args:
        whole: output folder of the uninterrupted run.
        continued: output folder of the other run.
        before_kill: the metrics of ``continued`` at the time of the kill.
    """
    rows = read_metrics(continued)
    # A repeated step has other timings. So a row that is the same as before belongs to a step that was not repeated.
    before = {row["step"]: row for row in before_kill if "loss" in row}
    kept = max((row["step"] for row in rows if "loss" in row and row == before.get(row["step"])), default=0)
    of_whole, of_continued = _compared_values(read_metrics(whole)), _compared_values(rows)
    worst: dict[str, float] = {}
    first = None
    table = [f"{'step':<6}{'uninterrupted':<22}{'continued':<22}difference"]
    for step in sorted(of_whole.keys() | of_continued.keys()):
        a, b = of_whole.get(step, {}), of_continued.get(step, {})
        differences = {
            name: _relative_difference(a.get(name, math.nan), b.get(name, math.nan))
            for name in a | b
            if name not in a or name not in b or a[name].hex() != b[name].hex()
        }
        for name, value in differences.items():
            worst[name] = max(worst.get(name, 0.0), value)
        first = step if differences and first is None else first
        text = ", ".join(f"{name} {value:.1e}" for name, value in differences.items()) or "none"
        table.append(f"{step:<6}{_shown(a):<22}{_shown(b):<22}{text}")
    weights = _weights_difference(whole / "final", continued / "final")
    table.append(f"{'final weights':<50}{weights or 'none'}")
    num_steps = max(of_whole)
    if not kept or kept >= num_steps:
        reason = "began at step 1 again" if not kept else "had no step left to do"
        return Comparison("not continued", table, f"not continued: the run {reason}")
    if first is None and not weights:
        num = num_steps - kept
        steps = "1 step" if num == 1 else f"{num} steps"
        return Comparison("exact", table, f"exact: {steps} after the kill and the final weights are equal bit for bit")
    if first is None:
        return Comparison("differs", table, f"differs in the final weights: {weights}")
    values = ", ".join(f"{value:.1e} in {name}" for name, value in worst.items())
    verdict = f"differs from step {first} on, worst relative difference {values}; final weights: {weights or 'equal'}"
    if first <= kept:
        verdict += f"\nStep {first} is before the kill: two runs differ here though neither was resumed."
    return Comparison("differs", table, verdict)


def _compared_values(rows: list[Row]) -> dict[int, dict[str, float]]:
    """The compared values of each step, from its training row and the evaluation after it."""
    values: dict[int, dict[str, float]] = {}
    for row in rows:
        named = {name: float(row[name]) for name in COMPARED_KEYS if name in row}
        values[row["step"]] = values.get(row["step"], {}) | named
    return values


def _relative_difference(a: float, b: float) -> float:
    difference = abs(a - b) / abs(a) if a else abs(a - b)
    return math.inf if math.isnan(difference) else difference


def _shown(values: dict[str, float]) -> str:
    name = next((name for name in COMPARED_KEYS if name in values), None)
    return f"{name} {values[name]:.9g}" if name else "missing"


def _weights_difference(whole: Path, continued: Path) -> str:
    """How the tensors in two folders differ, as text; empty if they are equal bit for bit."""
    files = [sorted(folder.glob("*.safetensors")) for folder in (whole, continued)]
    if not all(files):
        return "missing"
    pairs = list(zip(*files, strict=False))
    if len(files[0]) == len(files[1]) and all(a.name == b.name and filecmp.cmp(a, b, False) for a, b in pairs):
        return ""
    import torch
    from safetensors import safe_open

    opened = [[safe_open(file, "pt") for file in group] for group in files]
    one, other = ({name: file for file in group for name in file.keys()} for group in opened)  # noqa: SIM118
    num, worst = len(one.keys() ^ other.keys()), 0.0
    for name in one.keys() & other.keys():
        a, b = one[name].get_tensor(name).flatten(), other[name].get_tensor(name).flatten()
        same_kind = a.dtype == b.dtype and a.shape == b.shape
        if not same_kind or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            num += 1
            worst = max(worst, (a.double() - b.double()).abs().max().item() if same_kind else math.inf)
    return f"{num} of {len(one)} tensors differ, by up to {worst:.1e}" if num else ""
