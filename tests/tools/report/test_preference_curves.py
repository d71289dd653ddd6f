"""The curves of preferences: training beside evaluation; of several runs, one chart shows only what is comparable."""

import re

from report_helpers import opened_pairs, pair_evaluation, pair_row, step_row

from kit.tools.report.chart import NUM_COLOURS, draw
from kit.tools.report.curves import charts_of, charts_over


def shown(charts):
    """The titles of the charts with a value, and label, values and colour of their lines."""
    found = {}
    for chart in charts:
        lines = [(line.label, line.values.tolist(), line.colour) for line in chart.series if len(line.values)]
        if lines:
            found[chart.title] = lines
    return found


def test_chosen_and_rejected_share_a_chart_and_lines_of_evaluations_are_dashed(tmp_path):
    charts = shown(charts_of(opened_pairs(tmp_path, [pair_row(1), pair_row(2), pair_evaluation(2)])))
    assert list(charts)[:6] == [
        "loss (dpo, beta 0.1)",
        "accuracy, % of the pairs",
        "margin of the rewards",
        "rewards",
        "log-probability of an answer, nats",
        "tokens of an answer",
    ]
    assert [label for label, *_ in charts["loss (dpo, beta 0.1)"]] == ["training", "evaluation"]
    assert charts["accuracy, % of the pairs"] == [("training", [87.5, 87.5], 0), ("evaluation", [87.5], 1)]
    labels, values, colours = zip(*charts["rewards"], strict=True)
    assert labels == ("chosen", "rejected", "chosen (eval)", "rejected (eval)")
    assert values == ([0.25, 0.25], [-0.5, -0.5], [0.25], [-0.5])
    assert [colour - NUM_COLOURS for colour in colours[2:]] == list(colours[:2])
    assert [label for label, *_ in charts["tokens of an answer"]] == ["chosen", "rejected"]


def test_a_share_has_an_axis_to_its_end_and_a_dashed_line_a_dashed_key(tmp_path):
    charts = {c.title: c for c in charts_of(opened_pairs(tmp_path, [pair_row(1), pair_evaluation(1)]))}
    accuracy = draw([charts["accuracy, % of the pairs"]])
    grid = re.search("<g class=y-zero>(.*?)</g>", accuracy)[1]
    assert ">100</text>" in grid and ">0</text>" in grid and ">chance</text>" in accuracy
    assert draw([charts["rewards"]]).count(" dashed'></i>") == 2 and "dashed" not in accuracy


def test_kto_has_its_kl_and_good_and_bad_answers(tmp_path):
    rows = [pair_row(1, kl=0.5), pair_evaluation(1, kl=0.25)]
    charts = shown(charts_of(opened_pairs(tmp_path, rows, settings={"objective": "kto"})))
    assert charts["kl to the reference, nats (below 0: 0)"] == [("training", [0.5], 0), ("evaluation", [0.25], 1)]
    assert [label for label, *_ in charts["rewards"]] == ["good", "bad", "good (eval)", "bad (eval)"]


def test_the_accuracy_of_a_model_that_equals_its_reference_is_not_drawn(tmp_path):
    rows = [pair_evaluation(0, rewards__accuracies=0.0), pair_row(1), pair_evaluation(1)]
    for objective, values in (("dpo", [87.5]), ("simpo", [0.0, 87.5])):
        charts = shown(charts_of(opened_pairs(tmp_path, rows, settings={"objective": objective})))
        assert charts["accuracy, % of the pairs"][1][1] == values


def test_runs_of_one_objective_share_all_charts(tmp_path):
    rows = [pair_row(1), pair_evaluation(1)]
    charts = shown(charts_over([opened_pairs(tmp_path / name, rows) for name in "ab"], ["a", "b"]))
    assert list(charts)[:6] == [
        "training loss (dpo, beta 0.1)",
        "evaluation loss (dpo, beta 0.1)",
        "evaluation accuracy, % of the pairs",
        "evaluation margin (dpo, beta 0.1)",
        "evaluation log-probability of chosen",
        "evaluation log-probability of rejected",
    ]
    assert all([label for label, *_ in lines] == ["a", "b"] for lines in charts.values())


def test_losses_and_margins_of_other_settings_have_charts_of_their_own_behind_the_accuracy(tmp_path):
    rows = [pair_row(1), pair_evaluation(1)]
    runs = [opened_pairs(tmp_path / "a", rows), opened_pairs(tmp_path / "b", rows, settings={"dpo_loss": "ipo"})]
    charts = shown(charts_over(runs, ["a", "b"]))
    titles = list(charts)
    assert titles[0] == "evaluation accuracy, % of the pairs" and len(charts[titles[0]]) == 2
    for what in ("training loss", "evaluation loss", "evaluation margin"):
        assert [label for label, *_ in charts[f"{what} (dpo, beta 0.1)"]] == ["a"]
        assert [(label, colour) for label, _, colour in charts[f"{what} (dpo, beta 0.1, dpo_loss ipo)"]] == [("b", 1)]
    assert len(charts["learning rate"]) == 2


def test_runs_without_an_evaluation_are_compared_by_their_training(tmp_path):
    charts = shown(charts_over([opened_pairs(tmp_path / name, [pair_row(1)]) for name in "ab"], ["a", "b"]))
    assert [values for _, values, _ in charts["training accuracy, % of the pairs"]] == [[87.5], [87.5]]


def test_a_run_on_answers_has_none_of_them(tmp_path):
    run = opened_pairs(tmp_path, [step_row(1)], settings={"objective": "sft"})
    assert list(shown(charts_of(run)))[:2] == ["loss, nats per supervised token", "learning rate"]
