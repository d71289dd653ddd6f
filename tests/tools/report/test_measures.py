"""Which evaluation is the best depends on the measure, and its value reads as people write it."""

import pytest

from kit.config.fields import choices
from kit.config.settings.evaluation import EvalSettings
from kit.tools.report.measures import ACCURACY, EXACT, FOLLOWED, LOSS, MARGIN

ROWS = [
    {"step": 0, LOSS.key: 0.7},
    {"step": 2, LOSS.key: 0.5, ACCURACY.key: 0.75, MARGIN.key: 1.5},
    {"step": 4, LOSS.key: 0.6, ACCURACY.key: 0.75, MARGIN.key: 2.5},
]


@pytest.mark.parametrize(("measure", "step"), [(LOSS, 2), (ACCURACY, 2), (MARGIN, 4)])
def test_the_best_is_the_lowest_loss_and_the_highest_of_all_else_at_its_first_evaluation(measure, step):
    assert measure.best(ROWS)["step"] == step
    assert measure.best(ROWS[:1]) is (ROWS[0] if measure is LOSS else None)


def test_shares_are_percentages():
    assert [measure.text(0.875) for measure in (LOSS, ACCURACY, MARGIN, EXACT)] == [
        "0.8750",
        "87.5%",
        "0.8750",
        "87.5%",
    ]
    assert LOSS.text(25.0) == "25.00"


def test_each_metric_that_a_run_can_follow_is_a_measure():
    assert list(FOLLOWED) == choices(EvalSettings.model_fields["metric_for_best_model"].annotation)
