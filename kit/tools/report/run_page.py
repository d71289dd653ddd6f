"""``report.html``: a page about one run, with its curves, warnings, evaluations, answers, data and settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.answers import is_share
from kit.console import is_main, say
from kit.tools.report.chart import NUM_COLOURS, curves_section
from kit.tools.report.curves import charts_of, largest_data_sets
from kit.tools.report.measures import ACCURACY, LOSS, MARGIN
from kit.tools.report.metrics import MOST_ODD, Columns, Row
from kit.tools.report.page import escaped, page, section, table, write_page
from kit.tools.report.preference_curves import names_of_answers
from kit.tools.report.remarks import remarks
from kit.tools.report.runs import ReportedRun, duration, read_reported_run
from kit.tools.report.summary import definition_list, results_list, results_of, run_facts
from kit.tools.report.words import after, chosen_and_defaults, meaning, setting, start_text, words
from kit.train.loop_state import OF_THE_DATA

FILE = "report.html"  # in an output_dir
_HIDDEN = ("fingerprint", "num_encoded")  # of use to the kit only
_FIRST = (LOSS.key, ACCURACY.key, MARGIN.key)  # of the columns of evaluations
_FEW_COLUMNS = 4  # of numbers fit on a narrow screen
_MOST_SIDE_BY_SIDE = 3  # data sets, as columns of a table


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the ``output_dir`` of a run, and return its path.

    Raises:
        UserError: there is no run, or the folder cannot be written to.
    """
    return write_page(folder / FILE, run_page(read_reported_run(folder)))


def write_report_at_end(folder: Path) -> None:
    """Write the report at the end of a run and print its path. If that fails, print a warning; never raises."""
    if not is_main():
        return
    try:
        say(f"report: {write_report(folder)}")
    except Exception as error:
        say(f"warning: no report ({type(error).__name__}: {error})")


def run_page(run: ReportedRun, reload_seconds: float = 0) -> str:
    """Return the page of a run as HTML. For ``reload_seconds`` see ``kit.tools.report.page.page``."""
    took = "" if run.seconds is None else f", {duration(run.seconds)} of training"
    warnings = "".join(f"<li>{escaped(text)}</li>" for text in remarks(run))
    parts = [
        f"<h1>{escaped(run.name)}</h1><p class=line>{escaped(run.status + took)}</p>",
        results_list(results_of(run)),
        f"<h2>Warnings</h2><ul class=warnings>{warnings}</ul>" if warnings else "",
        curves_section(charts_of(run), _marks(run)),
        _odd_steps(run),
        _evaluations(run),
        _by_data_set(run),
        _answers(run),
        f"<h2>Run</h2>{definition_list(run_facts(run))}",
        _data(run.record["data"]),
        _recipe(run),
        section("Versions", _pairs("package", "version", run.record["versions"])),
    ]
    return page(f"{run.name}: {run.folder.absolute()}", parts, reload_seconds=reload_seconds)


def _odd_steps(run: ReportedRun) -> str:
    odd = [row for row in run.odd_steps if "samples" in row][:MOST_ODD]
    if not odd:
        return ""
    rows = [{"step": row["step"], "what": _oddity(row), "samples": ", ".join(row["samples"])} for row in odd]
    more = len(run.odd_steps) - len(odd)
    note = f"<p>{more:,} more are in metrics.jsonl.</p>" if more else ""
    return section("Steps to look at", table(["step", "what", "samples"], rows) + note)


def _oddity(row: Row) -> str:
    """Why the metrics list the samples of this step: it was skipped, or its loss was a spike."""
    if "nonfinite" in row:
        return f"skipped: {row['nonfinite']}"
    loss = f"loss {row['loss']:.4g}, " if "loss" in row else ""
    return f"{loss}{row['loss_spike']:.1f} times the usual"


def _evaluations(run: ReportedRun) -> str:
    if not run.evaluations:
        return ""
    of_evaluation = (key for row in run.evaluations for key in row if key.startswith("eval_"))
    keys = [key for key in dict.fromkeys(of_evaluation) if not key.startswith(OF_THE_DATA)]
    of_data_sets = {key for key in keys if key.startswith("eval_loss/")}
    if len(of_data_sets) > NUM_COLOURS:
        keys = [key for key in keys if key not in of_data_sets]  # ``_by_data_set`` has them
    keys.sort(key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
    answers = dict(zip(("chosen", "rejected"), names_of_answers(run), strict=True))
    named = {key: words(key, answers) for key in keys}
    rows = [
        {"after step": row["step"], **{name: _measured(key, row.get(key)) for key, name in named.items()}}
        for row in run.evaluations
    ]
    columns = ["after step", *named.values()]
    return section("Evaluation", table(columns, rows, stacks=len(columns) > _FEW_COLUMNS))


def _by_data_set(run: ReportedRun) -> str:
    """The losses of all data sets where these are too many for lines and columns; else empty."""
    evaluated = Columns(run.evaluations)
    names = largest_data_sets(run)
    names += [name for key in evaluated.keys if (name := key.removeprefix("eval_loss/")) not in (key, *names)]
    if len(names) <= NUM_COLOURS:
        return ""
    rows = []
    for name in names:
        row: dict[str, Any] = {"data set": name}
        for title, values in (
            ("training loss", run.training.values(f"loss/{name}")),
            ("evaluation loss", evaluated.values(f"eval_loss/{name}")),
        ):
            if len(values):
                row |= {f"{title}, first": f"{values[0]:.4f}", f"{title}, last": f"{values[-1]:.4f}"}
        rows.append(row)
    return section("Loss by data set", table(list(dict.fromkeys(key for row in rows for key in row)), rows))


def _measured(key: str, value: float | None) -> str | None:
    if value is None:
        return None
    if key == ACCURACY.key or is_share(key):
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.5g}"


def _answers(run: ReportedRun) -> str:
    """The answers of the last evaluation, with those to the same prompts of the first one."""
    answered = [row for row in run.evaluations if row.get("answers")]
    if not answered:
        return ""
    first, last = answered[0], answered[-1]
    before = {answer["prompt"]: answer["text"] for answer in first["answers"]}
    names = [after(row["step"]) for row in (first, last)]
    rows = []
    for answer in last["answers"]:
        row = {"asked": answer["prompt"], "expected": answer["reference"]}
        if first is not last:
            row[names[0]] = before.get(answer["prompt"])
        rows.append({**row, names[1]: answer["text"], "exact": answer["exact"]})
    return section("Answers", table(list(rows[0]), rows))


def _data(data: Mapping[str, Any]) -> str:
    """What is used of the data, and what became of the rows of each data set: in one table if each use has one set."""
    uses: dict[str, Any] = {"training": data["train"], "evaluation": data.get("evaluation")}
    used: dict[str, dict[str, Any]] = {name: counts for name, counts in uses.items() if isinstance(counts, dict)}
    sources = [source for source in data["sources"] if isinstance(source, dict)]
    if len(sources) == len(used):  # those to train on come first
        pairs = zip(used.items(), sources, strict=True)
        together = {f"{name}: {source.get('name')}": _both(column, source) for (name, column), source in pairs}
        return section("Data", _side_by_side(together))
    return section("Data", _side_by_side(used) + _by_source(sources))


def _both(used: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    num_samples = source.get("num_samples")
    some = {"num_samples_in_the_data_set": num_samples} if num_samples != used.get("num_samples") else {}
    return {**used, **some, **{key: value for key, value in source.items() if key not in (*used, "name")}}


def _by_source(sources: list[dict[str, Any]]) -> str:
    if not sources:
        return ""
    if len(sources) <= _MOST_SIDE_BY_SIDE:
        named = {f"{source.get('name')}": {k: v for k, v in source.items() if k != "name"} for source in sources}
        if len(named) == len(sources):
            return _side_by_side(named)
    keys = list(dict.fromkeys(key for source in sources for key in source if key not in _HIDDEN))
    rows = [{words(key): source.get(key) for key in keys} for source in sources]
    return table(list(map(words, keys)), rows)


def _side_by_side(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a column for each mapping, and a row for each key that has a value other than 0 in one of them."""
    known = dict.fromkeys(key for column in columns.values() for key in column if key not in _HIDDEN)
    keys = [key for key in known if any(column.get(key) for column in columns.values())]  # not: 0 rows were cut
    rows = [{"": words(key), **{name: column.get(key) for name, column in columns.items()}} for key in keys]
    return table(["", *columns], rows, stacks=len(columns) >= _FEW_COLUMNS)


def _recipe(run: ReportedRun) -> str:
    chosen, defaults = chosen_and_defaults(run.recipe)
    columns = ["setting", "value", "meaning"]

    def settings_table(part: Mapping[str, Any]) -> str:
        rows = [{"setting": key, "value": setting(value), "meaning": meaning(key)} for key, value in part.items()]
        return table(columns, rows)

    summary = f"<summary>{len(defaults)} settings at their defaults</summary>"
    name = run.record.get("recipe_name")
    title = f"Recipe {escaped(name)}" if isinstance(name, str) and name else "Recipe"
    return (
        section(title, settings_table(chosen))
        + f"<details>{summary}<div class=scroll>{settings_table(defaults)}</div></details>"
    )


def _marks(run: ReportedRun) -> str:
    """What the vertical lines in the charts mean."""
    texts = [start_text(each) for each in run.starts if each["step"]]
    return "".join(f"<p class=line><i class=key-mark></i>{escaped(text)}</p>" for text in texts)


def _pairs(name: str, value: str, pairs: Mapping[str, Any]) -> str:
    rows = [{name: one, value: "not installed" if two is None else str(two)} for one, two in pairs.items()]
    return table([name, value], rows, stacks=False)
