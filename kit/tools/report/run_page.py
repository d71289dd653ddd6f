"""``report.html``: a page about one run, or a comparison of several: results, warnings, curves, settings."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kit.config.settings.objective import DECLARED
from kit.scoring.metrics import is_share
from kit.scoring.own_metric import key_of
from kit.system.console import is_main, say
from kit.tools.report.chart import Line, draw
from kit.tools.report.page import Pictures, cell, escaped, page, section, table, write_page
from kit.tools.report.remarks import remarks
from kit.tools.report.runs import MOST_ODD, ReportedRun, finite_number, read_reported_run

FILE = "report.html"  # in an output_dir
_GIB = 2**-30
_OWN = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "run_name"}  # settings that are not compared
_HIDDEN = ("fingerprint", "num_encoded")  # of the data
_FOLLOWED = {f"eval_{metric.key}": metric for spec in DECLARED.values() for metric in spec.metrics if metric.title}


_OF_TOOLS = {"completions/turns": "turns of a completion", "tools/failures": "failed tool calls of a completion"}


class _Curve(NamedTuple):
    """A chart of one run; of several runs, with lines for each. Two keys are of training and of evaluation."""

    title: str
    keys: Sequence[str]  # of the metrics; those of evaluations begin with ``eval_``
    is_share: bool = False  # shown in %
    is_fitted: bool = False  # see ``draw``


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


def report_page(runs: Sequence[ReportedRun]) -> str:
    """Return the page of a run, or of several, as HTML."""
    labels = [str(run.folder) for run in runs]
    if len(runs) == 1:
        (run,) = runs
        title, after, about = run.name, _details(run), [run.status, *_restarts(run)]
        boxes = (f"<div><dt>{escaped(key)}</dt><dd>{escaped(text)}</dd></div>" for key, text in _results(run).items())
        top = f"<dl class=results>{''.join(boxes)}</dl>"
        warnings = remarks(run)
    else:
        title, about = f"{len(runs)} runs: {', '.join(labels)}", []
        top, after = section("Results", table(results(runs))), [section("Differences", table(differences(runs)))]
        warnings = [f"{label}: {text}" for label, run in zip(labels, runs, strict=True) for text in remarks(run)]
    lines = "".join(f"<p class=line>{escaped(line)}</p>" for line in about)
    warned = "".join(f"<li>{escaped(text)}</li>" for text in warnings)
    warned = section("Warnings", f"<ul class=warnings>{warned}</ul>" if warned else "")
    curves = "".join(_charts(runs, labels))
    curves = f"<h2>Curves</h2><div class=charts>{curves}</div>" if curves else ""
    return page(title, [f"<h1>{escaped(title)}</h1>", lines, top, warned, curves, *after])


# --- results


def _results(run: ReportedRun) -> dict[str, str]:
    """The results of a run, from the first value to the last, by name."""
    found = {}
    followed = [f"eval_{metric.key}" for metric in run.recipe.declared.metrics if metric.is_followed]
    keys = ["eval_loss", *followed, *run.answer_metrics, "reward" if run.recipe.rolls_out else "loss"]
    if run.recipe.declared.rolls_out:  # the loss on reference answers says little
        keys = ["eval_reward", *keys[1:], "eval_loss"]
    for key in keys:
        values = run.values(key)
        if len(values):
            found[_name(key)] = " → ".join(_measured(key, value) for value in values[[0, -1][: len(values)]])
    return found


def _name(key: str) -> str:
    known = {key: metric.title for key, metric in _FOLLOWED.items()}
    known |= {"loss": "training loss", "eval_loss": "evaluation loss", "eval_reward": "evaluation reward"}
    return known.get(key) or key.removeprefix("eval_").replace("_", " ")


def _measured(key: str, value: float) -> str:
    if is_share(key) or (key in _FOLLOWED and _FOLLOWED[key].is_share):
        return f"{value:.1%}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"


def results(runs: Sequence[ReportedRun]) -> list[dict[str, str]]:
    """Return the table of results, a row for each run: first and last values, and the best by its own metric."""
    rows = []
    for run in runs:
        row = {"run": str(run.folder), "state": run.status.partition(";")[0], **_results(run), **_speed(run)}
        key = run.recipe.metric_for_best_model
        if best := run.best(key):
            row[f"best {_name(key)}"] = f"{_measured(key, best[1])} after step {best[0]:,}"
        rows.append(row)
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key, "") for key in keys} for row in rows]


# --- curves


def _charts(runs: Sequence[ReportedRun], labels: Sequence[str]) -> Iterator[str]:
    rewards = dict.fromkeys(f"rewards/{key_of(name)}" for run in runs for name in run.recipe.rewards)
    is_evaluated = any(len(run.points("eval_reward")) for run in runs)
    curves = [
        _Curve("reward", ("reward", *["eval_reward"] * is_evaluated)),
        *(_Curve(key, (key,)) for key in rewards),
        _Curve("loss", ("loss", "eval_loss"), is_fitted=True),
        *(_Curve(title, (key, f"eval_{key}")) for key, title in _OF_TOOLS.items()),
    ]
    for key in dict.fromkeys(key for run in runs for key in run.answer_metrics):
        curves.append(_Curve(f"{_name(key)}, %", (key,), True) if is_share(key) else _Curve(_name(key), (key,)))
    metrics = dict.fromkeys(metric for run in runs for metric in run.recipe.declared.metrics if metric.chart)
    curves += [_Curve(each.chart, (each.key, f"eval_{each.key}"), each.is_share) for each in metrics]
    marks = []
    if len(runs) == 1:
        marks = [start["step"] for start in runs[0].record.get("starts", []) if start["step"]]
    for curve in curves:
        lines = []
        for at, (run, label) in enumerate(zip(runs, labels, strict=True)):
            for i, key in enumerate(curve.keys):
                name = ("training", "evaluation")[i] if len(curve.keys) > 1 else "last"
                colour, is_dashed = i, False
                if len(runs) > 1:  # each run has its colour
                    name, colour, is_dashed = label if name == "last" else f"{label}, {name}", at, i > 0
                points = run.points(key) * (1, 100 if curve.is_share else 1)
                lines.append(Line(name, points, colour, is_dashed))
        yield draw(curve.title, lines, marks, curve.is_fitted)


def _restarts(run: ReportedRun) -> Iterator[str]:
    """The vertical lines in the charts: restarts."""
    for start in run.record.get("starts", []):
        if start["step"]:
            changed = f", changed: {cell(start['changed'])}" if start["changed"] else ""
            yield f"Dashed line: resumed after step {start['step']:,} ({start.get('time')}){changed}"


# --- details


def _details(run: ReportedRun) -> list[str]:
    name = run.record.get("recipe_name")
    settings = run.recipe.model_dump(mode="json", exclude_defaults=True)
    return [
        section("Loss spikes and skipped steps", table(_odd_steps(run))),
        section("Most frequent confusions, last evaluation", table(_confusions(run))),
        section("Generated answers", table(_answers(run))),
        section("Rollout samples", table(_rollouts(run))),
        section("Run", _named(_facts(run))),
        section("Data", table(_data(run))),
        section(f"Recipe {name}" if name else "Recipe", _named(settings)),
        section("Versions", _named(run.record["versions"])),
    ]


def _named(values: Mapping[str, Any]) -> str:
    """A table of two columns."""
    return table([{"name": name, "value": value} for name, value in values.items()])


def _confusions(run: ReportedRun) -> list[dict[str, Any]]:
    confusions = run.details.get("confusions", ())
    return [{"label": label, "predicted": predicted, "texts": n} for label, predicted, n in confusions]


def _odd_steps(run: ReportedRun) -> list[dict[str, Any]]:
    rows = []
    for row in run.odd_steps[:MOST_ODD]:
        spike = finite_number(row.get("loss_spike"))
        what = f"loss {spike:.1f} times the running median" if spike else f"skipped: {row.get('nonfinite')}"
        rows.append({"step": row["step"], "what": what, "samples": row.get("samples")})
    return rows


def _answers(run: ReportedRun) -> list[dict[str, Any]]:
    """The answers of the last evaluation, with those to the same prompts of the first one."""
    if not run.answered:
        return []
    first, last = run.answered[0], run.answered[-1]
    before = {_prompt(answer): _answer(answer) for answer in first["answers"]}
    has_rewards = any("reward" in answer for answer in last["answers"])
    has_pictures = any(answer.get("pictures") for answer in last["answers"])
    rows = []
    for answer in last["answers"]:
        pictures = {"pictures": Pictures(answer.get("pictures"))} if has_pictures else {}
        row = {"prompt": answer.get("prompt"), **pictures, "expected": answer.get("reference")}
        if first is not last:
            earlier = f"after step {first['step']:,}" if first["step"] else "before"
            row[earlier] = before.get(_prompt(answer))
        row |= {f"after step {last['step']:,}": _answer(answer), "exact match": answer.get("exact")}
        rows.append(row | ({"reward": answer.get("reward")} if has_rewards else {}))
    return rows


def _answer(answer: dict[str, Any]) -> Any:
    return answer.get("conversation") or answer.get("text")


def _prompt(answer: dict[str, Any]) -> tuple[str, str]:
    """What identifies a prompt: its text and its pictures."""
    return cell(answer.get("prompt")), cell(answer.get("pictures"))


def _rollouts(run: ReportedRun) -> list[dict[str, Any]]:
    """Completions with their rewards, from the first and the last logged rollout; each prompt once."""
    rows, last = [], None
    for row in run.rollouts:
        for answer in row["rollout"]:
            prompt = {"step": row["step"], "prompt": answer.get("prompt"), "expected": answer.get("reference")}
            row_of = dict.fromkeys(prompt) if prompt == last else prompt
            rows.append(row_of | {"completion": answer.get("text"), "reward": answer.get("reward")})
            last = prompt
    return rows


def _facts(run: ReportedRun) -> dict[str, str]:
    """Hardware, strategy, model and speed of a run, by name."""
    strategy, recipe = run.strategy, run.recipe
    device = f"CPU, {strategy.num_threads} threads" if strategy.device == "cpu" else strategy.device
    return {
        "hardware": f"{strategy.num_processes} x {device}",
        "strategy": strategy.describe(recipe, recipe),
        "model": f"{recipe.model_name_or_path} ({recipe.method})",
        "objective": recipe.objective,
        **_speed(run),
        "folder": str(run.folder.absolute()),
    }


def _speed(run: ReportedRun) -> dict[str, str]:
    """The median speed without the first logged step, the time, and the memory."""
    speeds, peaks = run.values("tokens_per_second"), run.values("peak_memory_bytes")
    found = {}
    if len(speeds):
        found["tokens per second"] = cell(round(float(np.median(speeds[1:] if len(speeds) > 1 else speeds))))
    if run.seconds:
        found["minutes"] = f"{run.seconds / 60:,.1f}"
    if len(peaks):
        predicted = finite_number((run.record.get("plan") or {}).get("tensors"))
        said = f", {predicted * _GIB:.1f} predicted" if predicted else ""
        found["peak memory, GiB"] = f"{peaks.max() * _GIB:.1f}{said}"
    return found


def _data(run: ReportedRun) -> list[dict[str, Any]]:
    """The counts of the training and the evaluation data, and of each dataset, without those that are 0 everywhere."""
    data = run.record["data"]
    rows: list[dict[str, Any]] = [{"name": "training", **data["train"]}]
    rows += [{"name": "evaluation", **data["evaluation"]}] if data.get("evaluation") else []
    rows += data["sources"]
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if value and key not in _HIDDEN)
    return [{key.removeprefix("num_").replace("_", " "): row.get(key) for key in keys} for row in rows]


def differences(runs: Sequence[ReportedRun]) -> list[dict[str, str]]:
    """Return the table of differences between runs: a row for each setting, version, or fact of strategy and data."""
    columns = {str(run.folder): _compared(run) for run in runs}
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    rows = [{"": key, **{label: column.get(key, "") for label, column in columns.items()}} for key in keys]
    return [row for row in rows if len({row[label] for label in columns}) > 1]


def _compared(run: ReportedRun) -> dict[str, str]:
    data = run.record["data"]
    values = run.recipe.model_dump(mode="json", exclude=_OWN) | {"learning_rate": run.recipe.peak_learning_rate}
    values |= {
        "training data": data.get("fingerprint"),
        "evaluation data": (data.get("evaluation") or {}).get("fingerprint"),
    }
    values |= run.strategy.record() | run.record["versions"]
    return {key: cell(value) for key, value in values.items()}
