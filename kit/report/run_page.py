"""``report.html``: a page with curves, evaluations, data and settings of a run.

It needs only ``run.json`` and ``metrics.jsonl``, so it can be written at any time, also for a run that is still running
or was killed.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kit.console import is_main, say
from kit.errors import Problem, UserError
from kit.report.page import escaped, page, section, svg, table
from kit.run.record import read_metrics, read_run


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the ``output_dir`` of a run, and return its path.

    Raises:
        UserError: there is no run, or the folder cannot be written to.
    """
    given, strategy = read_run(folder / "run.json")
    line = strategy.describe(given)
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    rows = read_metrics(folder)
    training = [row for row in rows if "loss" in row]
    evaluation = [row for row in rows if "eval_loss" in row]
    charts = [
        chart(
            "loss, nats per supervised token", [("training", training, "loss"), ("evaluation", evaluation, "eval_loss")]
        ),
        chart("gradient norm", [("", training, "grad_norm")]),
        chart("learning rate", [("", training, "learning_rate")]),
        chart("tokens per second", [("", training, "tokens_per_second")]),
        chart("peak memory of rank 0, GiB", [("", training, "peak_memory_bytes")], scale=2**-30),
    ]
    names = [key for key in (training[-1] if training else {}) if key.startswith("loss/")]
    if names:
        charts.append(chart("loss by data set", [(key.removeprefix("loss/"), training, key) for key in names]))
    if any("eval_exact_match" in row for row in evaluation):
        charts.append(chart("exact match", [("", evaluation, "eval_exact_match")]))
    odd = [{**row, "what": _oddity(row), "samples": ", ".join(row["samples"])} for row in rows if "samples" in row]
    sources = run["data"]["sources"]
    recipe = [{"key": key, "value": _setting(value)} for key, value in _given(run["recipe"]).items()]
    folder_path = folder.absolute()
    parts = [
        f"<h1>{escaped(folder_path.name)}</h1>",
        *(f"<p class=line>{escaped(text)}</p>" for text in (str(folder_path), line, _progress(run, training))),
        f"<div class=charts>{''.join(f'<div>{picture}</div>' for picture in charts)}</div>",
        section("Steps to look at", table(["step", "what", "samples"], odd)) if odd else "",
        section("Evaluation", table(["step", *_eval_keys(evaluation)], evaluation)) if evaluation else "",
        section("Answers", _answers(evaluation[-1]["answers"])) if evaluation and "answers" in evaluation[-1] else "",
        section("Data", _data_table(run["data"])),
        section("Data sets", table(list(sources[0]), sources)),
        section("Recipe", table(["key", "value"], recipe)),
        section("Versions", table(list(run["versions"]), [run["versions"]])),
    ]
    temporary = folder / ".report.partial"
    try:
        temporary.write_text(page(f"{folder_path.name}: {folder_path}", parts), encoding="utf-8")
        return temporary.replace(folder / "report.html")
    except OSError as error:
        raise UserError(Problem(str(folder), f"report.html cannot be written ({error.strerror})")) from None


def write_report_at_end(folder: Path) -> None:
    """Write the report at the end of a run and print its path. If that fails, print a warning; never raises."""
    if not is_main():
        return
    try:
        say(f"report: {write_report(folder)}")
    except Exception as error:
        say(f"warning: no report ({type(error).__name__}: {error})")


def _progress(run: dict[str, Any], training: list[dict[str, Any]]) -> str:
    """How many steps the run has done, as text."""
    if run.get("finished_steps"):
        early = f": {run['ended_early']}" if run.get("ended_early") else ""
        return f"finished after {run['finished_steps']} steps{early}"
    steps = training[-1]["step"] if training else 0
    return f"not finished: {steps} steps so far" + (
        ", stopped by a signal" if run.get("interrupted") is not None else ""
    )


def _oddity(row: dict[str, Any]) -> str:
    """Why the metrics list the samples of this step: it was skipped, or its loss was a spike."""
    if "nonfinite" in row:
        return f"skipped: {row['nonfinite']}"
    return f"loss {row['loss']:.4g}, {row['loss_spike']:.1f} times the usual"


def chart(title: str, series: list[tuple[str, list[dict[str, Any]], str]], scale: float = 1.0) -> str:
    """Draw a chart with the step as x-axis, as SVG text.

    Args:
        series: (label, rows of metrics, key of the value) for each line.
        scale: factor for all values.
    """
    figure = Figure(figsize=(4.6, 2.7))  # fixed margins: to search for them doubles the time
    axes = figure.subplots(gridspec_kw={"left": 0.15, "right": 0.97, "bottom": 0.19, "top": 0.88})
    for label, rows, key in series:
        points = [(row["step"], row[key] * scale) for row in rows if isinstance(row.get(key), int | float)]
        if points:
            marker = "o" if len(points) < 20 else None
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=label)
    axes.set_ylim(bottom=0)  # else small noise would fill the chart
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.3)
    if len(axes.lines) > 1:
        axes.legend(fontsize=9)
    return svg(figure)


def _eval_keys(rows: list[dict[str, Any]]) -> list[str]:
    return [key for key in rows[-1] if key.startswith("eval_")]


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value not in (None, "", [], {})}


def _setting(value: Any) -> Any:
    """A setting as a recipe would write it; each entry of a list in a line of its own."""
    if isinstance(value, list):
        return "\n".join(
            ", ".join(f"{key}: {_setting(inner)}" for key, inner in _given(entry).items())
            if isinstance(entry, dict)
            else str(entry)
            for entry in value
        )
    if isinstance(value, dict):
        return ",".join(f"{column}={field}" for column, field in value.items())
    return value if isinstance(value, bool | float) else str(value)


def _data_table(data: dict[str, Any]) -> str:
    sets = [name for name in ("train", "evaluation") if data[name]]
    rows = [{"": measure, **{name: data[name].get(measure) for name in sets}} for measure in data["train"]]
    return table(["", *sets], rows)


def _answers(answers: list[dict[str, Any]]) -> str:
    columns = {"asked": "prompt", "expected": "reference", "answered": "text", "exact": "exact"}
    return table(list(columns), [{title: answer[key] for title, key in columns.items()} for answer in answers])
