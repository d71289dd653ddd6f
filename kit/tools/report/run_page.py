"""``report.html``: a page about one run, or about several beside each other: results, warnings, curves, settings."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kit.answers import is_share
from kit.console import is_main, say
from kit.tools.report.chart import Chart, Line, charts_section, number
from kit.tools.report.page import bullets, cell, escaped, page, section, table, write_page
from kit.tools.report.remarks import remarks
from kit.tools.report.runs import ACCURACY, MOST_ODD, ReportedRun, duration, finite_number, read_reported_run

FILE = "report.html"  # in an output_dir
_GIB = 2**-30
_MARGIN = "eval_rewards/margins"
_OWN = (
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "run_name",
)  # settings without effect on results
_HIDDEN = ("fingerprint", "num_encoded")  # of the data
_MOST_DATA_SETS = 8  # in a chart


class _Curve(NamedTuple):
    """A chart of a run; of several runs, with lines for each."""

    title: str
    keys: Sequence[str]  # of the metrics, those of evaluations begin with ``eval_``; the second is dashed
    scale: float = 1.0
    is_fitted: bool = False  # see ``Chart``
    names: Sequence[str] = ("training", "evaluation")  # of the lines, if there are two


_CURVES = (
    _Curve("accuracy, % of the pairs", ("rewards/accuracies", ACCURACY), 100),
    _Curve("margin of the rewards", ("rewards/margins", _MARGIN)),
    _Curve("log-probability of an answer, nats", ("logps/chosen", "logps/rejected"), 1, True, ("chosen", "rejected")),
    _Curve("kl to the reference, nats", ("kl", "eval_kl")),
    _Curve("learning rate", ("learning_rate",)),
    _Curve("gradient norm before clipping", ("grad_norm",), 1, True),
    _Curve("tokens per second", ("tokens_per_second",)),
    _Curve("TFLOP/s of rank 0", ("tflops_per_second",)),
    _Curve("peak memory of rank 0, GiB", ("peak_memory_bytes",), _GIB),
    _Curve("GPU utilisation, %", ("gpu_utilisation",), 100),
    _Curve("waiting for data, % of the time", ("data_wait_share",), 100),
    _Curve("waiting for the slowest rank, % of the time", ("rank_wait_share",), 100),
    _Curve("waiting for the network, % of the time", ("communication_share",), 100),
    _Curve("padding, % of the computed tokens", ("padding_share",), 100),
)


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the ``output_dir`` of a run, and return its path.

    Raises:
        UserError: there is no run, or the folder cannot be written to.
    """
    return write_page(folder / FILE, report_page([read_reported_run(folder)]))


def write_report_at_end(folder: Path) -> None:
    """Write the report at the end of a run and print its path. If that fails, print a warning; never raises."""
    if not is_main():
        return
    try:
        say(f"report: {write_report(folder)}")
    except Exception as error:
        say(f"warning: no report ({type(error).__name__}: {error})")


def report_page(runs: Sequence[ReportedRun], reload_seconds: float = 0) -> str:
    """Return the page of a run, or of several, as HTML. For ``reload_seconds`` see ``kit.tools.report.page.page``."""
    labels = labels_of(runs)
    if len(runs) == 1:
        title, top, after = f"{labels[0]}: {runs[0].folder.absolute()}", _result(runs[0]), _details(runs[0])
        warnings = remarks(runs[0])
    else:
        title = f"{len(runs)} runs: {', '.join(labels)}"
        top = f"<h1>{len(runs)} runs</h1><p>{escaped(verdict(runs))}</p>" + section("Results", table(results(runs)))
        after = [section("What differs", table(differences(runs)))]
        warnings = [f"{label}: {text}" for label, run in zip(labels, runs, strict=True) for text in remarks(run)]
    warned = section("Warnings", bullets("warnings", warnings))
    curves = charts_section(list(_charts(runs, labels)), _restarts(runs[0]) if len(runs) == 1 else "")
    return page(title, [top, warned, curves, *after], reload_seconds)


def labels_of(runs: Sequence[ReportedRun]) -> list[str]:
    """Return a name for each run: that of its folder; the whole path where two have the same name."""
    counts = Counter(run.name for run in runs)
    return [run.name if counts[run.name] == 1 else str(run.folder) for run in runs]


# --- results


def _result(run: ReportedRun) -> str:
    about = f"{run.status}, {duration(run.seconds)} of training" if run.seconds else run.status
    boxes = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>" for name, text in _results(run).items()
    )
    return f"<h1>{escaped(run.name)}</h1><p class=line>{escaped(about)}</p><dl class=results>{boxes}</dl>"


def _results(run: ReportedRun) -> dict[str, str]:
    """What a run reached, from the first value to the last: texts by what it is."""
    found = {}
    for key in ("eval_loss", ACCURACY, _MARGIN, *run.answer_metrics, "loss"):
        values = (run.training if key == "loss" else run.evaluations).values(key)
        if len(values):
            found[_name(key)] = " → ".join(_measured(key, value) for value in values[[0, -1][: len(values)]])
    return found


def _name(key: str) -> str:
    known = {"loss": "training loss", "eval_loss": "evaluation loss", ACCURACY: "accuracy", _MARGIN: "margin"}
    return known.get(key) or key.removeprefix("eval_").replace("_", " ")


def _measured(key: str, value: float) -> str:
    if key == ACCURACY or is_share(key):
        return f"{value:.1%}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"


def results(runs: Sequence[ReportedRun]) -> list[dict[str, str]]:
    """Return the table of results, a row for each run."""
    labels = labels_of(runs)
    rows = [
        {"run": label, "state": run.state, "steps": f"{run.steps_done:,}", **_results(run), **_speed(run)}
        for label, run in zip(labels, runs, strict=True)
    ]
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key, "") for key in keys} for row in rows]


def verdict(runs: Sequence[ReportedRun]) -> str:
    """Return which run is the best, or why none is."""
    found = [
        (best, label, run) for label, run in zip(labels_of(runs), runs, strict=True) if (best := run.best_evaluation())
    ]
    if len(found) < 2:
        return "No run is named as the best: that takes two with an evaluation."
    if len({(run.evaluated_on, run.objective, run.recipe.metric_for_best_model) for _, _, run in found}) > 1:
        return "No run is named as the best: evaluation data, objective, or metric_for_best_model differ."
    key = found[0][2].recipe.metric_for_best_model
    values = [best.value for best, _, _ in found]
    value = min(values) if key == "eval_loss" else max(values)
    names = [f"{label} (after step {best.step:,})" for best, label, _ in found if best.value == value]
    return f"Best, by {_name(key)} {_measured(key, value)}: {', '.join(names)}."


# --- curves


def _charts(runs: Sequence[ReportedRun], labels: Sequence[str]) -> Iterator[Chart]:
    losses = [_Curve("loss", ("loss", "eval_loss"), 1, True)]
    if not all(run.has_one_loss for run in runs):
        losses = [_Curve("training loss", ("loss",), 1, True), _Curve("evaluation loss", ("eval_loss",), 1, True)]
    metrics = dict.fromkeys(key for run in runs for key in run.answer_metrics)
    shares = [
        _Curve(f"{_name(key)}, %", (key,), 100) if is_share(key) else _Curve(_name(key), (key,)) for key in metrics
    ]
    marks = [start["step"] for start in runs[0].record["starts"] if start["step"]] if len(runs) == 1 else []
    for curve in [*losses, *shares, *_CURVES]:
        lines = [
            line
            for i, (run, label) in enumerate(zip(runs, labels, strict=True))
            for line in _lines(curve, run, i, label, len(runs))
        ]
        yield Chart(curve.title, lines, marks, curve.is_fitted)
    for prefix, title in (("loss/", "training loss by data set"), ("eval_loss/", "evaluation loss by data set")):
        if len(runs) == 1:
            yield Chart(title, _by_data_set(runs[0], prefix), marks, True)


def _lines(curve: _Curve, run: ReportedRun, number_of: int, label: str, num_runs: int) -> list[Line]:
    """The lines of a run in a chart: with other runs of one colour, else of one colour each."""
    lines = []
    for i, key in enumerate(curve.keys):
        rows = run.evaluations if key.startswith("eval_") else run.training
        name = curve.names[i] if len(curve.keys) > 1 else "last"
        if num_runs > 1:
            name = label if name == "last" else f"{label}, {name}"
        colour = i if num_runs == 1 else number_of
        lines.append(Line(name, rows.steps(key), rows.values(key) * curve.scale, colour, i > 0 and num_runs > 1))
    return lines


def _by_data_set(run: ReportedRun, prefix: str) -> list[Line]:
    rows = run.evaluations if prefix.startswith("eval_") else run.training
    keys = [key for key in rows.keys if key.startswith(prefix)]
    keys.sort(key=lambda key: -run.training.values(f"supervised_tokens/{key.removeprefix(prefix)}").sum())
    return [
        Line(key.removeprefix(prefix), rows.steps(key), rows.values(key), i)
        for i, key in enumerate(keys[:_MOST_DATA_SETS])
    ]


def _restarts(run: ReportedRun) -> str:
    """What the vertical lines in the charts mean."""
    texts = []
    for start in run.record["starts"]:
        if start["step"]:
            changed = f", changed: {'; '.join(map(str, start['changed']))}" if start["changed"] else ""
            texts.append(f"Dashed line: continued after step {start['step']:,} ({start.get('time')}){changed}")
    return "".join(f"<p class=line>{escaped(text)}</p>" for text in texts)


# --- how it was done


def _details(run: ReportedRun) -> list[str]:
    name = run.record.get("recipe_name")
    settings = run.recipe.model_dump(mode="json", exclude_defaults=True)
    return [
        section("Steps to look at", table(_odd_steps(run))),
        section("Answers", table(_answers(run))),
        section("Run", _named(facts(run))),
        section("Data", table(_data(run))),
        section(f"Recipe {name}" if name else "Recipe", _named(settings)),
        section("Versions", _named(run.record["versions"])),
    ]


def _named(values: Mapping[str, Any]) -> str:
    """A table of two columns."""
    return table([{"name": name, "value": setting(value)} for name, value in values.items()])


def _odd_steps(run: ReportedRun) -> list[dict[str, Any]]:
    rows = []
    for row in run.odd_steps[:MOST_ODD]:
        spike = finite_number(row.get("loss_spike"))
        what = f"loss {spike:.1f} times the usual" if spike else f"skipped: {row.get('nonfinite')}"
        rows.append({"step": row["step"], "what": what, "samples": setting(row.get("samples"))})
    return rows


def _answers(run: ReportedRun) -> list[dict[str, Any]]:
    """The answers of the last evaluation, with those to the same prompts of the first one."""
    if not run.answered:
        return []
    first, last = run.answered[0], run.answered[-1]
    before = {setting(answer.get("prompt")): answer.get("text") for answer in first["answers"]}
    rows = []
    for answer in last["answers"]:
        row = {"asked": answer.get("prompt"), "expected": answer.get("reference")}
        if first is not last:
            row[f"after step {first['step']:,}" if first["step"] else "before"] = before.get(
                setting(answer.get("prompt"))
            )
        rows.append({**row, f"after step {last['step']:,}": answer.get("text"), "exact": answer.get("exact")})
    return rows


def facts(run: ReportedRun) -> dict[str, str]:
    """Return how a run was done: texts by name."""
    strategy, recipe = run.strategy, run.recipe
    device = f"CPU, {strategy.num_threads} threads" if strategy.device == "cpu" else strategy.device
    return {
        "hardware": f"{strategy.num_processes} x {device}",
        "strategy": strategy.describe(recipe, recipe),
        "model": f"{recipe.model_name_or_path} ({recipe.method})",
        "objective": run.objective,
        **_speed(run),
        "folder": str(run.folder.absolute()),
    }


def _speed(run: ReportedRun) -> dict[str, str]:
    """The median speed without the first logged step, and the memory."""
    speeds, peaks = run.training.values("tokens_per_second"), run.training.values("peak_memory_bytes")
    found = {}
    if len(speeds):
        found["tokens per second"] = number(round(float(np.median(speeds[1:] if len(speeds) > 1 else speeds))))
    if len(peaks):
        predicted = finite_number((run.record.get("plan") or {}).get("tensors"))
        said = f", {predicted * _GIB:.1f} predicted" if predicted else ""
        found["peak memory, GiB"] = f"{peaks.max() * _GIB:.1f}{said}"
    return found


def _data(run: ReportedRun) -> list[dict[str, Any]]:
    """What became of the rows of each data set, and what is used: without what is 0 everywhere."""
    data = run.record["data"]
    rows: list[dict[str, Any]] = [{"name": "to train on", **data["train"]}]
    rows += [{"name": "to evaluate on", **data["evaluation"]}] if data.get("evaluation") else []
    rows += data["sources"]
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if value and key not in _HIDDEN)
    return [{key.removeprefix("num_").replace("_", " "): row.get(key) for key in keys} for row in rows]


def differences(runs: Sequence[ReportedRun]) -> list[dict[str, str]]:
    """Return the table of what differs between runs: a row for each setting, version, or fact of strategy and data."""
    columns, labels = [_compared(run) for run in runs], labels_of(runs)
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [{"": key, **{label: c.get(key, "") for label, c in zip(labels, columns, strict=True)}} for key in keys]
    return [row for row in rows if len({row[label] for label in labels}) > 1]


def _compared(run: ReportedRun) -> dict[str, str]:
    recipe = run.recipe.model_dump(mode="json") | {"learning_rate": run.recipe.peak_learning_rate}
    data = {"training data": run.record["data"].get("fingerprint"), "evaluation data": run.evaluated_on}
    values = {key: value for key, value in recipe.items() if key not in _OWN}
    values |= run.strategy.record() | data | run.record["versions"]
    return {key: setting(value) for key, value in values.items()}


def setting(value: Any) -> str:
    """Return a value as text."""
    if isinstance(value, list):
        return "; ".join(map(setting, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {setting(each)}" for key, each in value.items() if each not in (None, "", [], {}))
    return cell(value)
