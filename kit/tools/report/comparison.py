"""Several runs beside each other: their curves in the same charts, how they differ, and their results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kit.tools.report.chart import curves_section
from kit.tools.report.curves import GIB, charts_over
from kit.tools.report.measures import ACCURACY, EXACT, LOSS, MARGIN, Measure, measure_of
from kit.tools.report.metrics import Columns
from kit.tools.report.page import escaped, page, section, table
from kit.tools.report.remarks import peak_bytes, remarks
from kit.tools.report.runs import ReportedRun, duration
from kit.tools.report.summary import definition_list, median_utilisation, tokens_per_second
from kit.tools.report.words import after, setting

# Settings that have no effect on a result.
_OWN = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "run_name")
_STRATEGY = {
    "type": "strategy",
    **{key: key for key in ("num_processes", "num_replicas", "mixed_precision", "device", "rehearsal")},
}


def comparison_page(runs: Sequence[ReportedRun], reload_seconds: float = 0) -> str:
    """Return the page of several runs as HTML. For ``reload_seconds`` see ``kit.tools.report.page.page``."""
    labels = labels_of(runs)
    title = f"{len(runs)} runs: {', '.join(labels)}"
    results_table, differing = results(runs), differences(runs)
    same = "<p>Recipes, versions, strategies and data are the same.</p>"
    warnings = ""
    for label, run in zip(labels, runs, strict=True):
        warnings += "".join(f"<li><b>{escaped(label)}</b>: {escaped(text)}</li>" for text in remarks(run))
    parts = [
        f"<h1>{len(runs)} runs</h1><p class=verdict>{escaped(best_runs(runs).text)}</p>",
        section("Results", table(list(results_table[0]), results_table)),
        curves_section(charts_over(runs, labels)),
        section("What differs", table(list(differing[0]), differing) if differing else same),
        f"<h2>Warnings</h2><ul class=warnings>{warnings}</ul>" if warnings else "",
        f"<h2>Folders</h2>{definition_list({k: str(r.folder.absolute()) for k, r in zip(labels, runs, strict=True)})}",
    ]
    return page(title, parts, reload_seconds=reload_seconds)


def labels_of(runs: Sequence[ReportedRun]) -> list[str]:
    """Return a name for each run: that of its folder, with as many folders above it as make the names differ."""
    parts = [run.folder.absolute().parts for run in runs]
    for num in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-num:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.folder) for run in runs]


class Best(NamedTuple):
    """Which runs of several are the best, and why; none if they cannot be compared."""

    numbers: list[int]  # positions among the runs; several if they are equally good
    text: str


def best_runs(runs: Sequence[ReportedRun]) -> Best:
    """Return the runs that are the best by ``metric_for_best_model``, if at least two can be compared."""
    labels = labels_of(runs)
    evaluated = [i for i, run in enumerate(runs) if run.evaluations]
    without = [label for label, run in zip(labels, runs, strict=True) if not run.evaluations]
    missing = f" {_all_of(without)} {'has' if len(without) == 1 else 'have'} no evaluation." if without else ""
    if len(evaluated) < 2:
        return Best([], f"No run is marked as the best: that takes two with an evaluation.{missing}")
    if len({_evaluated_on(runs[i]) for i in evaluated}) > 1:
        why = "the evaluation data differ, so evaluation losses and exact matches are not comparable"
        return Best([], f"No run is marked as the best: {why}.{missing}")
    measure, why = judged_by([runs[i] for i in evaluated])
    if measure is None:
        return Best([], f"No run is marked as the best: {why}.{missing}")
    rows = {i: row for i in evaluated if (row := measure.best(runs[i].evaluations))}
    first = measure.best(list(rows.values()))
    assert first is not None
    value = first[measure.key]
    best = [i for i, row in rows.items() if row[measure.key] == value]
    named = [f"{labels[i]} ({after(rows[i]['step'])})" for i in best]
    among = "" if len(evaluated) == len(runs) else f" of the {len(evaluated)} that were evaluated"
    by = f"by the {measure.extreme} {measure.name}, {measure.text(value)}"
    because = f" Losses and margins are not comparable: {why}." if why else ""
    return Best(best, f"Best{among}, {by}: {_all_of(named)}.{because}{missing}")


class Judgement(NamedTuple):
    """By what several runs with evaluations on the same data are judged."""

    measure: Measure | None  # None: they are not comparable
    why: str  # there is no measure, or another one than the runs follow; else empty


def judged_by(runs: Sequence[ReportedRun]) -> Judgement:
    """Return the measure by which the runs are comparable: what they all follow, or of pairs the accuracy."""
    # A reward is a log-probability, or that of a token, or a ratio to the reference: one for each objective.
    if len({run.recipe.objective if run.is_of_preferences else run.objective for run in runs}) > 1:
        what = ", and with them what a reward is" if any(run.is_of_preferences for run in runs) else ""
        return Judgement(None, f"the objectives differ{what}")
    followed = {run.recipe.metric_for_best_model for run in runs}
    if len(followed) > 1:
        return Judgement(None, f"they follow different metrics (metric_for_best_model: {_all_of(sorted(followed))})")
    measure, differing = measure_of(followed.pop()), ""
    if runs[0].is_of_preferences and measure is not ACCURACY:
        names = runs[0].recipe.objective_settings
        differ = [name for name in names if len({run.recipe.objective_settings[name] for run in runs}) > 1]
        if differ:
            differing = f"{_all_of(differ)} {'differs' if len(differ) == 1 else 'differ'}"
            measure = ACCURACY
    if not all(measure.best(run.evaluations) for run in runs):
        incomparable = f"{differing}, so losses and margins are not comparable"
        return Judgement(None, incomparable if differing else f"not every one has an evaluation with {measure.key}")
    return Judgement(measure, differing)


def _evaluated_on(run: ReportedRun) -> str:
    """The fingerprint of the tokenised evaluation data; empty if none is recorded."""
    evaluation = run.record["data"].get("evaluation")
    return str(evaluation.get("fingerprint", "")) if isinstance(evaluation, dict) else ""


def _all_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def results(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return the table of results, a row for each run. A value that no run has makes no column."""
    devices = {run.device for run in runs}
    device = devices.pop() if len(devices) == 1 else "process"
    best = best_runs(runs).numbers
    labels = [f"{label} (best)" if i in best else label for i, label in enumerate(labels_of(runs))]
    evaluated = [run for run in runs if run.evaluations]
    measure = judged_by(evaluated).measure if evaluated else None
    rows = [_result(label, run, device, measure or LOSS) for label, run in zip(labels, runs, strict=True)]
    if len({run.objective_text for run in runs}) == 1:
        rows = [{key: value for key, value in row.items() if key != "objective"} for row in rows]
    return [{key: value for key, value in row.items() if any(each[key] != "" for each in rows)} for row in rows]


def _result(label: str, run: ReportedRun, device: str, followed: Measure) -> dict[str, Any]:
    def last(measure: Measure) -> str:
        values = evaluations.values(measure.key)
        return measure.text(values[-1]) if len(values) else ""

    evaluations, losses = Columns(run.evaluations), run.training.values("loss")
    speed, peak, utilisation = tokens_per_second(run), peak_bytes(run), median_utilisation(run)
    best = followed.best(run.evaluations)
    of_best = followed.extreme if followed is LOSS else f"{followed.extreme} {followed.name}"
    ends = "finished" if run.record.get("finished_steps") else "running" if run.is_at_work else "not finished"
    return {
        "run": label,
        "state": ends,
        "steps": run.steps_done,
        "duration": "" if run.seconds is None else duration(run.seconds),
        "objective": run.objective_text or "sft",
        "training loss": LOSS.text(losses[-1]) if len(losses) else "",
        "evaluation loss": last(LOSS),
        "accuracy": last(ACCURACY),
        "margin": last(MARGIN),
        f"{of_best} (step)": f"{followed.text(best[followed.key])} ({best['step']:,})" if best else "",
        "exact match": last(EXACT),
        f"tokens/s per {device}": "" if speed is None else f"{speed:,.0f}",
        "FLOPs utilisation": f"{utilisation:.1%}" if utilisation else "",
        "peak memory, GiB": "" if peak is None else f"{peak * GIB:.1f}",
    }


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
    recipe = run.recipe.model_dump(mode="json") | {"learning_rate": run.recipe.peak_learning_rate}
    recipe["beta"] = run.recipe.reward_scale or None
    settings = {key: setting(value) for key, value in recipe.items() if key not in _OWN}
    recorded = run.strategy.record()
    strategy = {word: setting(recorded[key]) for key, word in _STRATEGY.items()}
    trained_on = str(run.record["data"].get("fingerprint", ""))
    data = {"training data": trained_on[:12], "evaluation data": _evaluated_on(run)[:12] or "none"}
    versions = {name: str(version or "not installed") for name, version in run.record["versions"].items()}
    return settings | strategy | data | versions
