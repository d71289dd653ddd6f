"""Which curves a report shows, of one run and of several."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kit.tools.report.chart import NUM_COLOURS, Chart, Mark, Series, series
from kit.tools.report.measures import OF_ANSWERS
from kit.tools.report.metrics import Columns, finite_number
from kit.tools.report.preference_curves import preference_charts, preference_charts_over
from kit.tools.report.remarks import predicted_bytes
from kit.tools.report.runs import ReportedRun
from kit.tools.report.words import start_text

GIB = 2**-30
_WITH_ROUTERS = "with the auxiliary loss of routers"


@dataclass(frozen=True)
class _Curve:
    """A curve of a run."""

    title: str
    label: str  # where the title does not say which curve it is
    rows: Columns
    key: str
    scale: float = 1.0
    levels: Sequence[tuple[str, float]] = ()  # see ``Chart``
    is_fitted: bool = False  # see ``Chart``: where 0 is no value that one waits for

    def line(self, label: str = "", colour: int = 0) -> Series:
        """The line, by default under its own label."""
        return series(label or self.label, self.rows, self.key, self.scale, colour)


def charts_of(run: ReportedRun) -> list[Chart]:
    """Return the charts of a run. One without values is left out when they are drawn."""
    marks = [Mark(each["step"], start_text(each)) for each in run.starts if each["step"]]
    training, evaluation, *others = _curves(run)
    if run.has_one_loss:
        title = f"loss{_measure(run)}"
        losses = [Chart(title, [training.line(), evaluation.line(colour=1)], marks=marks, is_fitted=True)]
    else:
        losses = [
            Chart(each.title, [each.line(colour=i)], marks=marks, is_fitted=True)
            for i, each in enumerate((training, evaluation))
        ]
    evaluated = Columns(run.evaluations)
    by_data_set = [
        _by_data_set("training loss", run.training, "loss/", largest_data_sets(run), marks),
        _by_data_set("evaluation loss", evaluated, "eval_loss/", _parts(evaluated, "eval_loss/"), marks),
    ]
    single = [Chart(each.title, [each.line()], each.levels, marks, each.is_fitted) for each in others]
    return [*losses, *preference_charts(run, marks), *by_data_set, *single]


def _measure(run: ReportedRun) -> str:
    """What follows "evaluation loss" in a title: its unit, or the objective that it is of."""
    return f" ({run.objective_text})" if run.is_of_preferences else ", nats per supervised token"


def _by_data_set(what: str, rows: Columns, prefix: str, names: Sequence[str], marks: Sequence[Mark]) -> Chart:
    lines = [series(name, rows, f"{prefix}{name}", colour=i) for i, name in enumerate(names[:NUM_COLOURS])]
    return Chart(f"{what} by data set", lines, marks=marks, is_fitted=True)


def largest_data_sets(run: ReportedRun) -> list[str]:
    """Return the names of the data sets that have a loss, those with the most supervised tokens in a step first."""
    names = _parts(run.training, "loss/")
    return sorted(names, key=lambda name: -float(run.training.values(f"supervised_tokens/{name}").sum()))


def _parts(rows: Columns, prefix: str) -> list[str]:
    """The data sets that have a value in ``rows``: what follows ``prefix`` in a key."""
    return [key.removeprefix(prefix) for key in rows.keys if key.startswith(prefix)]


def charts_over(runs: Sequence[ReportedRun], labels: Sequence[str]) -> list[Chart]:
    """Return the charts of several runs, each with a line for each run that has values.

    What cannot be compared, such as losses of different objectives, has charts of its own.
    """
    columns = [_charts_of_one(curves, labels) for curves in zip(*map(_curves, runs), strict=True)]
    losses, others = list(chain(*columns[:2])), chain(*columns[2:])
    preferences = preference_charts_over(runs, labels)
    # First what can be compared: if there are several charts of losses, each is of some of the runs only.
    first = [*losses, *preferences] if len(losses) == 2 else [*preferences, *losses]
    return [*first, *others]


def _charts_of_one(curves: Sequence[_Curve], labels: Sequence[str]) -> list[Chart]:
    """The charts of one curve of several runs: one for all those with the same title."""
    by_title: dict[str, list[Series]] = {}
    for i, (each, label) in enumerate(zip(curves, labels, strict=True)):
        by_title.setdefault(each.title, []).append(each.line(label, i))
    return [Chart(title, lines, is_fitted=curves[0].is_fitted) for title, lines in by_title.items()]


def _curves(run: ReportedRun) -> list[_Curve]:
    """The curves of a run, the same ones in the same order for each run; the first two are the losses."""
    training, evaluations = run.training, Columns(run.evaluations)
    what = _measure(run)
    if not run.has_one_loss:
        named = run.objective_text or run.objective
        what = f" ({', '.join(filter(None, (named, _WITH_ROUTERS if run.has_router_loss else '')))})"
    clip, predicted = finite_number(run.recipe.max_grad_norm), predicted_bytes(run)
    # A limit far above all norms would press them to the bottom of the chart.
    is_near = clip is not None and (training.values("grad_norm") > clip / 4).any()
    per_speed = run.utilisation_per_speed
    return [
        _Curve(f"training loss{what}", "training", training, "loss", is_fitted=True),
        _Curve(f"evaluation loss{_measure(run)}", "evaluation", evaluations, "eval_loss", is_fitted=True),
        _Curve("exact match, % of the answers", "exact", evaluations, "eval_exact_match", 100),
        *(_Curve(f"{each.name}, %", each.name, evaluations, each.key, 100) for each in OF_ANSWERS[1:]),
        _Curve("learning rate", "rate", training, "learning_rate"),
        _Curve(
            "gradient norm before clipping",
            "norm",
            training,
            "grad_norm",
            1.0,
            [(f"clipped at {clip:g}", clip)] if clip and is_near else [],
            is_fitted=True,
        ),
        _Curve(
            f"tokens per second per {run.device}",
            "tokens/s",
            training,
            "tokens_per_second",
            1 / run.strategy.num_processes,
        ),
        _Curve(
            "model FLOPs utilisation, %",
            "utilisation",
            training if per_speed else Columns(),
            "tokens_per_second",
            100 * (per_speed or 0.0),
        ),
        _Curve(
            "peak memory of rank 0, GiB",
            "measured",
            training,
            "peak_memory_bytes",
            GIB,
            [("predicted", predicted * GIB)] if predicted else [],
        ),
        _Curve("waiting for data, % of the time", "waiting", training, "data_wait_share", 100),
        _Curve("waiting for the slowest rank, % of the time", "waiting", training, "rank_wait_share", 100),
        _Curve("waiting for the network, % of the time", "waiting", training, "communication_share", 100),
        _Curve("padding, % of the computed tokens", "padding", training, "padding_share", 100),
        _Curve("GPU utilisation, %", "busy", training, "gpu_utilisation", 100),
    ]
