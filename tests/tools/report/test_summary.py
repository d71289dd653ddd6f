"""The facts at the top of a report are those of record and metrics."""

from report_helpers import evaluation_row, opened, record, step_row

from kit.tools.report.summary import definition_list, run_summary


def test_the_facts_of_a_run(tmp_path):
    rows = [evaluation_row(0, eval_loss=4.0), *map(step_row, range(1, 5)), evaluation_row(4)]
    start = {"step": 0, "time": "2026-01-02T03:04:05+00:00", "changed": []}
    found = run_summary(opened(tmp_path, rows, finished_steps=4, starts=[start], plan={"tensors": 2**31}))
    assert found["status"] == "finished after 4 steps" and found["duration"] == "8 s"
    assert found["begun (UTC)"] == "2026-01-02 03:04:05" and found["hardware"] == "CPU, 1 threads a process"
    assert found["training loss"] == "4.5000 → 3.0000" and found["evaluation loss"] == "4.0000 → 2.2500"
    assert found["exact match"] == "50.0% → 50.0%" and found["tokens seen"] == "400"
    assert found["tokens per second per process"] == "45"  # 90 by two processes
    assert found["peak memory of rank 0"] == "1.0 GiB, 2.0 predicted"
    assert "4 x LlamaDecoderLayer sharded" in found["strategy"] and "model FLOPs utilisation" not in found


def test_utilisation_is_of_all_gpus(tmp_path):
    strategy = record()["strategy"] | {"device": "NVIDIA H100"}
    found = run_summary(opened(tmp_path, strategy=strategy, plan={"operations_per_token": 6e9 * 989.4}))
    assert found["model FLOPs utilisation"] == "27.0%" and found["hardware"] == "2 x NVIDIA H100"


def test_before_the_first_step_there_are_facts_too(tmp_path):
    assert {"status", "hardware", "strategy", "model"} == run_summary(opened(tmp_path, [])).keys()


def test_facts_are_text():
    assert definition_list({"<a>": "<b>"}) == "<dl class=facts><div><dt>&lt;a&gt;</dt><dd>&lt;b&gt;</dd></div></dl>"
