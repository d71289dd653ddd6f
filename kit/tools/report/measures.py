"""By which metrics of its evaluations a run is judged, and which evaluation is the best by them."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kit.answers import is_share
from kit.tools.report.metrics import Row
from kit.tools.report.words import words


class Measure(NamedTuple):
    """A metric of evaluations."""

    key: str  # in the metrics
    name: str
    extreme: Literal["lowest", "highest"]  # which value is the best

    def text(self, value: float) -> str:
        """Return a value as text."""
        if self == ACCURACY or is_share(self.key):
            return f"{value:.1%}"
        return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"

    def best(self, evaluations: Sequence[Row]) -> Row | None:
        """Return the first evaluation with the best value; None if none has a value."""
        rows = [row for row in evaluations if self.key in row]
        choose = min if self.extreme == "lowest" else max
        return choose(rows, key=lambda row: row[self.key], default=None)


LOSS = Measure("eval_loss", "evaluation loss", "lowest")
ACCURACY = Measure("eval_rewards/accuracies", "accuracy", "highest")  # share of the pairs
MARGIN = Measure("eval_rewards/margins", "margin", "highest")
EXACT = Measure("eval_exact_match", "exact match", "highest")  # share of the answers
OF_ANSWERS = (
    EXACT,
    Measure("eval_number", "right number", "highest"),
    Measure("eval_token_f1", "token F1", "highest"),
    Measure("eval_bleu", "BLEU", "highest"),
    Measure("eval_chrf", "chrF", "highest"),
    Measure("eval_rouge_l", "ROUGE-L", "highest"),
)
MEASURES = (LOSS, ACCURACY, MARGIN, *OF_ANSWERS)
FOLLOWED = {measure.key: measure for measure in MEASURES}  # by the values of metric_for_best_model


def measures_in(evaluations: Sequence[Row]) -> list[Measure]:
    """Return ``MEASURES``, and the others of answers in these evaluations: of the user, and of several answers."""
    own = dict.fromkeys(key for row in evaluations for key in row.get("intervals", ()) if key not in FOLLOWED)
    return [*MEASURES, *(Measure(key, words(key), "highest") for key in own)]


def measure_of(key: str) -> Measure:
    """Return the measure that ``metric_for_best_model`` names."""
    return FOLLOWED.get(key) or Measure(key, words(key), "highest")
