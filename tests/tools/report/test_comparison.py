"""Several runs: what they reached, and in what they differ."""

import json

import pytest
from report_helpers import evaluation_row, make_run, opened, opened_pairs, pair_evaluation, pair_row, record, step_row

from kit.tools.report.comparison import best_runs, comparison_page, differences, labels_of, results
from kit.tools.report.runs import read_reported_run

MEASURED = ("duration", "training loss", "evaluation loss", "lowest (step)", "exact match", "tokens/s per process")
MEASURED += ("peak memory, GiB",)


def other(folder, **settings):
    """A run with other settings, on another torch."""
    recipe = record()["recipe"] | settings
    return opened(folder, recipe=recipe, versions={"torch": "2.12.0"}, finished_steps=4)


def test_the_results_are_those_of_the_metrics(tmp_path):
    rows = [evaluation_row(2, eval_loss=1.0), *map(step_row, range(1, 5)), evaluation_row(4)]
    assert results([opened(tmp_path / "a", rows, finished_steps=4), opened(tmp_path / "b", [])]) == [
        {
            "run": "a",
            "state": "finished",
            "steps": 4,
            "duration": "8 s",
            "training loss": "3.0000",
            "evaluation loss": "2.2500",
            "lowest (step)": "1.0000 (2)",
            "exact match": "50.0%",
            "tokens/s per process": "45",
            "peak memory, GiB": "1.0",
        },
        {"run": "b", "state": "not finished", "steps": 0} | dict.fromkeys(MEASURED, ""),
    ]


def test_only_what_differs_is_listed_with_the_learning_rate_that_was_used(tmp_path):
    runs = [opened(tmp_path / "a"), other(tmp_path / "b", lora_r=8, learning_rate=1e-3, output_dir="elsewhere")]
    assert differences(runs) == [
        {"": "lora_r", "a": "16", "b": "8"},
        {"": "learning_rate", "a": "0.0002", "b": "0.001"},
        {"": "torch", "a": "2.13.0", "b": "2.12.0"},
    ]
    assert differences([runs[0], runs[0]]) == []


def test_runs_of_one_name_are_distinguished_by_the_folders_above(tmp_path):
    runs = [opened(tmp_path / "x/run"), opened(tmp_path / "y/run")]
    assert labels_of(runs) == ["x/run", "y/run"]
    runs.append(opened(tmp_path / "y/x/run"))
    assert len(set(labels_of(runs))) == 3 and labels_of(runs)[2] == "y/x/run"


def evaluated(folder, *losses, fingerprint="ef", **more):
    """A run with these evaluation losses, every second step."""
    values = record()
    values["data"]["evaluation"] = {"fingerprint": fingerprint}
    rows = [step_row(1, **more), *(evaluation_row(2 * i, eval_loss=loss) for i, loss in enumerate(losses))]
    return opened(folder, rows, **values)


def test_the_best_has_the_lowest_evaluation_loss_and_the_step_is_named(tmp_path):
    runs = [evaluated(tmp_path / "a", 9.0, 2.0), evaluated(tmp_path / "b", 9.0, 1.5, 3.0), evaluated(tmp_path / "c")]
    best, text = best_runs(runs)
    assert best == [1] and text == (
        "Best of the 2 that were evaluated, by the lowest evaluation loss, 1.5000: b (after step 2). "
        "c has no evaluation."
    )
    assert [row["run"] for row in results(runs)] == ["a", "b (best)", "c"]
    assert f"<p class=verdict>{text}</p>" in comparison_page(runs)


def test_equally_good_runs_are_all_the_best(tmp_path):
    best, text = best_runs([evaluated(tmp_path / name, 2.0) for name in "abc"])
    assert best == [0, 1, 2] and text.endswith(
        "2.0000: a (before training), b (before training) and c (before training)."
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"fingerprint": "x"}, "the evaluation data differ"),
        ({"objective": "FocalLoss"}, "the objectives differ"),
    ],
)
def test_no_run_is_the_best_of_what_cannot_be_compared(tmp_path, other, why):
    runs = [evaluated(tmp_path / "a", 2.0), evaluated(tmp_path / "b", 1.0, **other), evaluated(tmp_path / "c")]
    best, text = best_runs(runs)
    assert best == [] and why in text and text.endswith(" c has no evaluation.")


def of_pairs(folder, *shares, margin=0.75, **settings):
    """A run on pairs with these accuracies in its evaluations, every second step; its loss rises."""
    rows = [pair_row(1)]
    for i, share in enumerate(shares, 1):
        rows.append(pair_evaluation(2 * i, loss=i / 10, rewards__accuracies=share, rewards__margins=margin))
    return opened_pairs(folder, rows, settings=settings)


ACCURACIES, MARGINS = "eval_rewards/accuracies", "eval_rewards/margins"


@pytest.mark.parametrize(
    ("metric", "best", "text"),
    [
        ("eval_loss", [0, 1], "by the lowest evaluation loss, 0.1000: a (after step 2) and b (after step 2)."),
        (ACCURACIES, [1], "by the highest accuracy, 87.5%: b (after step 4)."),
        (MARGINS, [0], "by the highest margin, 2.0000: a (after step 2)."),
    ],
)
def test_the_best_follows_the_metric_that_all_runs_follow(tmp_path, metric, best, text):
    runs = [of_pairs(tmp_path / "a", 0.75, margin=2.0, metric_for_best_model=metric)]
    runs.append(of_pairs(tmp_path / "b", 0.5, 0.875, 0.75, metric_for_best_model=metric))
    assert best_runs(runs) == (best, f"Best, {text}")
    rows = results(runs)
    assert [(row["accuracy"], row["margin"]) for row in rows] == [("75.0%", "2.0000"), ("75.0%", "0.7500")]
    assert "objective" not in rows[0] and ("highest accuracy (step)" in rows[1]) == (metric == ACCURACIES)


@pytest.mark.parametrize("metric", ["eval_loss", MARGINS])
def test_of_other_settings_of_one_objective_the_accuracy_is_compared(tmp_path, metric):
    runs = [of_pairs(tmp_path / "a", 0.75, metric_for_best_model=metric)]
    runs.append(of_pairs(tmp_path / "b", 0.5, 0.875, beta=0.5, dpo_loss="hinge", metric_for_best_model=metric))
    why = "Losses and margins are not comparable: beta and dpo_loss differ."
    assert best_runs(runs) == ([1], f"Best, by the highest accuracy, 87.5%: b (after step 4). {why}")
    rows = results(runs)
    assert [row["objective"] for row in rows] == ["dpo, beta 0.1", "dpo, beta 0.5, dpo_loss hinge"]
    assert [row["highest accuracy (step)"] for row in rows] == ["75.0% (2)", "87.5% (4)"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"objective": "simpo"}, "the objectives differ, and with them what a reward is."),
        ({"objective": "sft"}, "the objectives differ, and with them what a reward is."),
        (
            {"metric_for_best_model": MARGINS},
            "they follow different metrics (metric_for_best_model: eval_loss and eval_rewards/margins).",
        ),
    ],
)
def test_runs_on_pairs_that_cannot_be_compared_have_no_best(tmp_path, settings, why):
    runs = [of_pairs(tmp_path / "a", 0.75), of_pairs(tmp_path / "b", 0.5, **settings)]
    assert best_runs(runs) == ([], f"No run is marked as the best: {why}")
    assert results(runs)[0]["lowest (step)"] == "0.1000 (2)" and "(best)" not in comparison_page(runs)


def test_of_kto_with_other_settings_there_is_no_accuracy_to_compare(tmp_path):
    rows = [{key: value for key, value in pair_evaluation(2).items() if "accuracies" not in key}]
    runs = [opened_pairs(tmp_path / f"{beta}", rows, settings={"objective": "kto", "beta": beta}) for beta in (0.1, 1)]
    why = "beta differs, so losses and margins are not comparable"
    assert best_runs(runs) == ([], f"No run is marked as the best: {why}.")


def test_a_metric_that_a_run_lacks_is_not_compared(tmp_path):
    """As of kto, where all answers of the evaluation data are good."""
    rows = [{key: value for key, value in pair_evaluation(2).items() if "margins" not in key}]
    settings = {"objective": "kto", "metric_for_best_model": MARGINS}
    runs = [opened_pairs(tmp_path / "a", rows, settings=settings)]
    runs.append(opened_pairs(tmp_path / "b", [pair_evaluation(2)], settings=settings))
    assert best_runs(runs).text.endswith("the best: not every one has an evaluation with eval_rewards/margins.")
    assert results(runs)[1]["margin"] == "0.7500"


def test_a_beta_that_is_given_as_its_default_is_no_difference(tmp_path):
    runs = [of_pairs(tmp_path / "a", 0.75), of_pairs(tmp_path / "b", 0.5, beta=0.1)]
    assert differences(runs) == [] and best_runs(runs).numbers == [0, 1]
    assert differences([runs[0], of_pairs(tmp_path / "c", beta=0.2)])[0] == {"": "beta", "a": "0.1", "c": "0.2"}


def test_a_single_run_with_an_evaluation_is_not_the_best_of_several(tmp_path):
    best, text = best_runs([evaluated(tmp_path / "a", 2.0), evaluated(tmp_path / "b"), evaluated(tmp_path / "c")])
    assert best == [] and text.endswith("two with an evaluation. b and c have no evaluation.")


def test_the_page_has_the_tables_and_the_curves_of_all_and_text_stays_text(tmp_path):
    runs = [opened(tmp_path / "a"), other(tmp_path / "<b>", dataset="<i>.jsonl")]
    page = comparison_page(runs)
    assert "<b>." not in page and "<i>." not in page and "&lt;i&gt;.jsonl" in page and "&lt;b&gt;" in page
    assert page.count("<figure") == 9 and "<dd>" in page and "data-reload" not in page
    assert " data-reload=2" in comparison_page(runs, 2.0)


def test_runs_with_other_evaluation_data_differ_in_them(tmp_path):
    values = record()
    values["data"]["evaluation"] = {"fingerprint": "cd"}
    other = opened(tmp_path / "b", **values)
    assert differences([opened(tmp_path / "a"), other])[-1] == {"": "evaluation data", "a": "ef", "b": "cd"}


def test_equal_runs_are_reported_as_equal(tmp_path):
    page = comparison_page([opened(tmp_path / "a"), opened(tmp_path / "b")])
    assert "Recipes, versions, strategies and data are the same." in page


def test_a_run_of_another_version_that_lacks_a_fact_is_compared_too(tmp_path):
    values = json.loads((make_run(tmp_path / "a") / "run.json").read_text())
    del values["recipe"]["dedup"], values["data"]["fingerprint"]
    (tmp_path / "a/run.json").write_text(json.dumps(values))
    assert differences([read_reported_run(tmp_path / "a"), opened(tmp_path / "b")]) == [
        {"": "training data", "a": "", "b": "ab"}
    ]
