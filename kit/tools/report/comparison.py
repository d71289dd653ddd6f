"""Several runs beside each other: their curves in the same charts, how they differ, and their results."""

from collections.abc import Sequence
from typing import Any

from kit.tools.report.chart import draw, extents
from kit.tools.report.curves import GIB, charts_over
from kit.tools.report.metrics import Columns
from kit.tools.report.page import escaped, page, section, table
from kit.tools.report.remarks import peak_bytes, remarks
from kit.tools.report.runs import ReportedRun, duration
from kit.tools.report.summary import definition_list, median_utilisation, tokens_per_second
from kit.tools.report.words import setting

# Settings that have no effect on a result.
_OWN = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "run_name")
_STRATEGY = {
    "type": "strategy",
    **{key: key for key in ("num_processes", "num_replicas", "mixed_precision", "device", "rehearsal")},
}


def comparison_page(runs: Sequence[ReportedRun], reload_seconds: float = 0) -> str:
    """Return the page of several runs as HTML. For ``reload_seconds`` see ``kit.tools.report.page.page``."""
    labels = labels_of(runs)
    charts = charts_over(runs, labels)
    title = f"{len(runs)} runs: {', '.join(labels)}"
    results_table, differing = results(runs), differences(runs)
    same = "<p>Recipes, versions, strategies and data are the same.</p>"
    warnings = ""
    for label, run in zip(labels, runs, strict=True):
        warnings += "".join(f"<li><b>{escaped(label)}</b>: {escaped(text)}</li>" for text in remarks(run))
    parts = [
        f"<h1>{len(runs)} runs</h1>",
        definition_list({label: str(run.folder.absolute()) for label, run in zip(labels, runs, strict=True)}),
        section("Results", table(list(results_table[0]), results_table)),
        section("What differs", table(list(differing[0]), differing) if differing else same),
        f"<h2>Course</h2><div class=charts>{draw(charts)}</div>",
        f"<h2>Warnings</h2><ul class=warnings>{warnings}</ul>" if warnings else "",
    ]
    return page(title, parts, axes=list(extents(charts)), reload_seconds=reload_seconds)


def labels_of(runs: Sequence[ReportedRun]) -> list[str]:
    """Return a name for each run: that of its folder if no two have the same, else its path."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def results(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return the table of results, a row for each run. A value that no run has makes no column."""
    devices = {run.device for run in runs}
    device = devices.pop() if len(devices) == 1 else "process"
    rows = [_result(label, run, device) for label, run in zip(labels_of(runs), runs, strict=True)]
    return [{key: value for key, value in row.items() if any(each[key] != "" for each in rows)} for row in rows]


def _result(label: str, run: ReportedRun, device: str) -> dict[str, Any]:
    def last(rows: Columns, key: str, form: str) -> str:
        values = rows.values(key)
        return f"{values[-1]:{form}}" if len(values) else ""

    evaluations = Columns(run.evaluations)
    speed, peak, utilisation = tokens_per_second(run), peak_bytes(run), median_utilisation(run)
    best = min(run.evaluations, key=lambda row: row["eval_loss"], default=None)
    ends = "finished" if run.record.get("finished_steps") else "running" if run.is_at_work else "not finished"
    return {
        "run": label,
        "state": ends,
        "steps": run.steps_done,
        "duration": "" if run.seconds is None else duration(run.seconds),
        "training loss": last(run.training, "loss", ".4f"),
        "evaluation loss": last(evaluations, "eval_loss", ".4f"),
        "lowest (step)": f"{best['eval_loss']:.4f} ({best['step']:,})" if best else "",
        "exact match": last(evaluations, "eval_exact_match", ".1%"),
        f"tokens/s per {device}": "" if speed is None else f"{speed:,.0f}",
        "FLOPs utilisation": f"{utilisation:.1%}" if utilisation else "",
        "peak memory, GiB": "" if peak is None else f"{peak * GIB:.1f}",
    }


EVALUATION_DATA = "evaluation data"  # the row of its fingerprints among the differences


def differences(runs: Sequence[ReportedRun]) -> list[dict[str, str]]:
    """Return the table of what differs between runs: a row for each setting, version, or fact of strategy and data."""
    columns = [_compared(run) for run in runs]
    labels = labels_of(runs)
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = []
    for key in keys:
        values = [column.get(key, "") for column in columns]
        if len(set(values)) > 1:
            rows.append({"": key, **dict(zip(labels, values, strict=True))})
    return rows


def _compared(run: ReportedRun) -> dict[str, str]:
    """What is compared of a run, as texts: settings, strategy, data, versions."""
    recipe = {**run.recipe.model_dump(mode="json"), "learning_rate": run.recipe.peak_learning_rate}
    settings = {key: setting(value) for key, value in recipe.items() if key not in _OWN}
    recorded = run.strategy.record()
    strategy = {word: setting(recorded[key]) for key, word in _STRATEGY.items()}
    evaluation = run.record["data"].get("evaluation")
    evaluated_on = str(evaluation.get("fingerprint", "")) if isinstance(evaluation, dict) else ""
    data = {"training data": str(run.record["data"].get("fingerprint", ""))[:12], EVALUATION_DATA: evaluated_on[:12]}
    versions = {name: str(version or "not installed") for name, version in run.record["versions"].items()}
    return settings | strategy | data | versions
