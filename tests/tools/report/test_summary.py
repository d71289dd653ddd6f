"""The results at the top of a report, and its facts, are those of record and metrics."""

import pytest
from report_helpers import evaluation_row, opened, opened_pairs, pair_evaluation, pair_row, record, step_row

from kit.tools.report.summary import Result, definition_list, results_list, results_of, run_facts


def test_the_results_are_before_and_after_and_say_after_which_steps(tmp_path):
    rows = [evaluation_row(0, eval_loss=4.0, eval_exact_match=0.0), *map(step_row, range(1, 5))]
    rows.append(evaluation_row(4, num_answers=1200))
    assert results_of(opened(tmp_path, rows)) == [
        ("evaluation loss", "4.0000 → 2.2500", "before training → after step 4"),
        ("exact match", "0.0% → 50.0%", "before training → after step 4, of 1,200 answers"),
        ("training loss", "4.5000 → 3.0000", "step 1 → step 4"),
    ]


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ([3.0, 1.0, 2.0], "after step 2 → after step 6, lowest: 1.0000 after step 4"),
        ([3.0, 2.0, 1.0], "after step 2 → after step 6, the last is the lowest"),
    ],
)
def test_of_several_evaluations_the_lowest_is_named(tmp_path, losses, note):
    rows = [evaluation_row(2 * i, eval_loss=loss) for i, loss in enumerate(losses, 1)]
    assert results_of(opened(tmp_path, rows))[0].note == note


def test_of_pairs_accuracy_and_margin_are_results_and_their_highest_is_named(tmp_path):
    rows = [pair_evaluation(0, loss=0.7, rewards__margins=0.0), pair_row(1)]
    rows += [pair_evaluation(2, rewards__accuracies=0.9), pair_evaluation(4), pair_evaluation(6)]
    run = opened_pairs(tmp_path, rows)
    assert results_of(run)[:3] == [
        ("evaluation loss", "0.7000 → 0.5000", "before training → after step 6, lowest: 0.5000 after step 2"),
        ("accuracy", "90.0% → 87.5%", "after step 2 → after step 6, highest: 90.0% after step 2"),
        ("margin", "0.0000 → 0.7500", "before training → after step 6, highest: 0.7500 after step 2"),
    ]
    assert run_facts(run)["objective"] == "dpo, beta 0.1"


def test_a_single_evaluation_is_no_change(tmp_path):
    [loss, *_] = results_of(opened(tmp_path, [step_row(1), evaluation_row(1)]))
    assert loss == ("evaluation loss", "2.2500", "after step 1")


def test_results_are_text():
    assert "&lt;b&gt;" in results_list([Result("loss", "<b>", "")]) and results_list([]) == ""


def test_the_facts_of_a_run(tmp_path):
    start = {"step": 0, "time": "2026-01-02T03:04:05+00:00", "changed": []}
    found = run_facts(opened(tmp_path, finished_steps=4, starts=[start], plan={"tensors": 2**31}))
    assert found["begun (UTC)"] == "2026-01-02 03:04:05" and found["hardware"] == "CPU, 1 threads a process"
    assert found["tokens seen"] == "400" and found["folder"] == str(tmp_path)
    assert found["tokens per second per process"] == "45"  # 90 by two processes
    assert found["peak memory of rank 0"] == "1.0 GiB, 2.0 predicted"
    assert "4 x LlamaDecoderLayer sharded" in found["strategy"] and "model FLOPs utilisation" not in found


def test_utilisation_is_of_all_gpus(tmp_path):
    strategy = record()["strategy"] | {"device": "NVIDIA H100"}
    found = run_facts(opened(tmp_path, strategy=strategy, plan={"operations_per_token": 6e9 * 989.4}))
    assert found["model FLOPs utilisation"] == "27.0%" and found["hardware"] == "2 x NVIDIA H100"


def test_before_the_first_step_there_are_facts_too(tmp_path):
    run = opened(tmp_path, [])
    assert {"hardware", "strategy", "model", "folder"} == run_facts(run).keys() and results_of(run) == []


def test_facts_are_text():
    assert definition_list({"<a>": "<b>"}) == "<dl class=facts><div><dt>&lt;a&gt;</dt><dd>&lt;b&gt;</dd></div></dl>"
