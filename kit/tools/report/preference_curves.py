"""The charts of objectives over preferences: rewards, accuracy, log-probabilities, of one run and of several."""

from collections.abc import Sequence
from dataclasses import dataclass

from kit.tools.report.chart import NUM_COLOURS, Chart, Mark, Series, series
from kit.tools.report.metrics import Columns
from kit.tools.report.runs import ReportedRun

_OF_CHOSEN, _OF_REJECTED = 2, 3  # colours


@dataclass(frozen=True)
class _Measured:
    """What is measured of each step, and of each evaluation under the same key with ``eval_`` before it."""

    name: str
    unit: str
    keys: Sequence[str]  # of the metrics; if two, of the chosen answers and of the rejected ones
    scale: float = 1.0
    levels: Sequence[tuple[str, float]] = ()  # see ``Chart``
    is_fitted: bool = False  # see ``Chart``
    reaches: float = 0.0  # see ``Chart``
    is_evaluated: bool = True  # False: no evaluation differs in it
    is_compared: bool = True  # whether it is shown of several runs
    depends: bool = False  # on the objective and its settings, so that values of others are not comparable

    def chart(self, title: str, lines: Sequence[Series], marks: Sequence[Mark] = ()) -> Chart:
        """Return the chart of some lines."""
        return Chart(title, lines, self.levels, marks, self.is_fitted, self.reaches)


def _both(kind: str) -> list[str]:
    return [f"{kind}/chosen", f"{kind}/rejected"]


_PREFERENCES = (
    _Measured("accuracy", ", % of the pairs", ["rewards/accuracies"], 100, [("chance", 50)], reaches=100),
    _Measured("margin", " of the rewards", ["rewards/margins"], depends=True),
    _Measured("rewards", "", _both("rewards"), is_compared=False, depends=True),
    _Measured("log-probability", " of an answer, nats", _both("logps"), is_fitted=True),
    _Measured("loss of the chosen answers", ", nats per token", ["nll_loss"], is_fitted=True),
    _Measured("kl to the reference", ", nats (below 0: 0)", ["kl"]),
    _Measured("tokens", " of an answer", _both("lengths"), is_evaluated=False, is_compared=False),
)


def names_of_answers(run: ReportedRun) -> tuple[str, str]:
    """Return what the answers are that the metrics call chosen and rejected."""
    return ("good", "bad") if run.recipe.declared.rows == "rated" else ("chosen", "rejected")


def preference_charts(run: ReportedRun, marks: Sequence[Mark]) -> list[Chart]:
    """Return the charts of a run, each of training and evaluation; none for another objective."""
    return [_chart(run, measured, marks) for measured in _PREFERENCES] if run.is_of_preferences else []


def _chart(run: ReportedRun, measured: _Measured, marks: Sequence[Mark]) -> Chart:
    """A chart of a metric. With two kinds of answers a kind has its colour, and lines of evaluations are dashed."""
    evaluations = Columns(run.evaluations if measured.is_evaluated else [])

    def line(label: str, rows: Columns, key: str, colour: int) -> Series:
        return series(label, rows, key, measured.scale, colour)

    first, *second = measured.keys
    if not second:
        lines = [line("training", run.training, first, 0), line("evaluation", evaluations, f"eval_{first}", 1)]
    else:
        kinds = list(zip(measured.keys, names_of_answers(run), (_OF_CHOSEN, _OF_REJECTED), strict=True))
        lines = [line(name, run.training, key, colour) for key, name, colour in kinds]
        lines += [
            line(f"{name} (eval)", evaluations, f"eval_{key}", colour + NUM_COLOURS) for key, name, colour in kinds
        ]
    return measured.chart(f"{measured.name}{measured.unit}", lines, marks)


def preference_charts_over(runs: Sequence[ReportedRun], labels: Sequence[str]) -> list[Chart]:
    """Return the charts of several runs: of their evaluations, or of the training where no run was evaluated."""
    evaluations = [Columns(run.evaluations) for run in runs]
    charts = []
    for measured in _PREFERENCES:
        for number, key in enumerate(measured.keys if measured.is_compared else ()):
            is_evaluated = any(f"eval_{key}" in rows.keys for rows in evaluations)
            when, before = ("evaluation", "eval_") if is_evaluated else ("training", "")
            by_title: dict[str, list[Series]] = {}
            for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
                if run.is_of_preferences:
                    of = f" of {names_of_answers(run)[number]}" if len(measured.keys) > 1 else ""
                    unit = f" ({run.objective_text})" if measured.depends else measured.unit
                    rows = evaluations[i] if is_evaluated else run.training
                    line = series(label, rows, f"{before}{key}", measured.scale, i)
                    by_title.setdefault(f"{when} {measured.name}{of or unit}", []).append(line)
            charts += [measured.chart(title, lines) for title, lines in by_title.items()]
    return charts
