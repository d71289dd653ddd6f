"""``tasks.jsonl`` in the folder of a run: scores on tasks of lm-evaluation-harness, and their part of the report.

Promises: a row of the table holds only scores of the same task, samples and way to ask.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit import durable
from kit.durable import open_regular
from kit.run.record import TASKS_FILE
from kit.tools.report.page import section, table
from kit.tools.report.words import after

_MOST_SIDE_BY_SIDE = 4  # models, as columns of the table


def add_task_scores(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Add rows to ``tasks.jsonl`` of a run, one for each model that was scored. Raises ``OSError``."""
    path = folder / TASKS_FILE
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in [*read_task_scores(folder), *rows]]
    durable.write_text(path, "".join(lines))
    return path


def read_task_scores(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of ``tasks.jsonl`` of a run; empty without one. What is damaged is left out."""
    rows = []
    with suppress(OSError), open_regular(folder / TASKS_FILE) as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("tasks"), dict) and type(row.get("step")) is int:
                    rows.append(row)
    return rows


def scores_in(task: Any) -> dict[str, tuple[float, float | None]]:
    """Return the scores of a task by metric, each with its standard error, if it has one.

    Args:
        task: as in a row of ``tasks.jsonl``, with the keys of lm-eval: ``acc,none`` and ``acc_stderr,none``.
    """
    given = task.get("scores") if isinstance(task, dict) else None
    scores: dict[str, Any] = given if isinstance(given, dict) else {}
    found = {}
    for key, value in scores.items():
        metric, _, kind = key.partition(",")
        if not metric.endswith("_stderr") and isinstance(value, int | float):
            error = scores.get(f"{metric}_stderr,{kind}")
            name = metric if kind in ("", "none") else f"{metric} ({kind})"
            found[name] = (float(value), float(error) if isinstance(error, int | float) else None)
    return found


def task_scores_section(folder: Path) -> str:
    """Return the table of the scores as HTML, the base first; empty if nothing was scored."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    columns: dict[str, int] = {}  # of the models, with the order that they have
    for row in read_task_scores(folder):
        model = "base" if row.get("is_base") else after(row["step"])
        for task, about in row["tasks"].items():
            for metric, (value, error) in scores_in(about).items():
                text = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
                columns[model] = -1 if row.get("is_base") else row["step"]
                found.setdefault((str(task), metric, _way(row, about)), {})[model] = text  # the last one counts
    if not found:
        return ""
    shown = sorted(columns, key=lambda name: columns[name])
    if len(shown) > _MOST_SIDE_BY_SIDE:
        shown = [*shown[:1], *shown[1 - _MOST_SIDE_BY_SIDE :]]
    rows = [{"task": task, "metric": metric, **scores, "asked": way} for (task, metric, way), scores in found.items()]
    return section("Tasks of lm-evaluation-harness", table(["task", "metric", *shown, "asked"], rows))


def _way(row: dict[str, Any], task: dict[str, Any]) -> str:
    """How a task was asked: scores that differ in it are not comparable."""
    parts = [f"{task.get('num_fewshot')}-shot", f"{task.get('num_samples')} samples"]
    parts += ["chat template" if row.get("chat_template") else "no chat template"]
    parts += ["system prompt"] if row.get("system_prompt") else []
    return ", ".join([*parts, f"version {task.get('version')}"])
