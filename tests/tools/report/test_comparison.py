"""Several runs: what they reached, and in what they differ."""

import json

import pytest
from report_helpers import evaluation_row, make_run, opened, record, step_row

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
