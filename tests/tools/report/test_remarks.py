"""What went wrong or was wasted is said in words; of a good run there is nothing to say."""

from report_helpers import evaluation_row, make_run, opened, record, step_row

from kit.tools.report.remarks import mean, remarks
from kit.tools.report.runs import read_reported_run

MANY = range(1, 31)


def falling(step, **changes):
    return step_row(step, loss=5 - step / 10, **changes)


def test_of_a_good_run_there_is_nothing_to_say(tmp_path):
    rows = [*map(falling, MANY), evaluation_row(0, eval_exact_match=0.1), evaluation_row(30, eval_loss=1.0)]
    assert remarks(opened(tmp_path, rows, finished_steps=30)) == []


def test_remarks_follow_from_the_metrics(tmp_path):
    cases = [
        ([], "No step has been done yet."),
        ([step_row(1), {"step": 2, "nonfinite": "loss nan", "samples": ["d:1"]}], "Step 2 was skipped because"),
        (
            [step_row(1), step_row(2, loss_spike=3.0, samples=["d:1"])],
            "Step 2 was marked by a loss far above the usual.",
        ),
        ([falling(step, grad_norm=7.0) for step in MANY], "The gradient was clipped in 100% of the steps"),
        ([step_row(step, loss=2.0) for step in MANY], "The training loss did not fall: 2 in the first 5 logged steps"),
        (
            [evaluation_row(2, eval_loss=1.0), evaluation_row(4, eval_loss=1.5), step_row(4)],
            "The evaluation loss was lowest after step 2 (1) and is 1.5 after step 4: the model overfits.",
        ),
        (
            [evaluation_row(0, eval_loss=1.0), *(step_row(step, loss=2.0) for step in MANY), evaluation_row(30)],
            "The evaluation loss was lowest before training (1) and is 2.25 after step 30: try a lower learning_rate,",
        ),
        ([evaluation_row(0), evaluation_row(4, eval_exact_match=0.25), step_row(4)], "Fewer answers are exact"),
        (
            [evaluation_row(4, num_answers=35, num_unended_answers=30), step_row(4)],
            "30 of 35 answers did not end within max_new_tokens 128",
        ),
        ([falling(step, data_wait_share=0.3) for step in MANY], "30% of the time was spent waiting for data."),
        (
            [falling(step, rank_wait_share=0.3, slowest_rank=5) for step in MANY],
            "30% of the time was spent waiting for the slowest rank, most often rank 5.",
        ),
        (
            [falling(step, communication_share=0.88) for step in MANY],
            "88% of the time even the slowest rank waited for collectives: the network between the ranks is",
        ),
        ([falling(step, padding_share=0.4) for step in MANY], "40% of the computed tokens were padding; --packing"),
    ]
    for rows, text in cases:
        found = remarks(opened(tmp_path, rows))
        assert [each for each in found if each.startswith(text)], found


def test_remarks_follow_from_the_record(tmp_path):
    values = record()
    values["data"]["sources"][0] |= {"num_truncated": 7, "num_dropped_long": 2, "num_skipped": 1}
    values["strategy"]["rehearsal"] = True
    run = opened(tmp_path, [falling(1, peak_memory_bytes=3 * 2**30)], **values, plan={"tensors": 2**30})
    (tmp_path / "error.txt").write_text("error: no memory\n")
    assert remarks(run) == [
        "The run ended with an error:\nerror: no memory",
        "This was a rehearsal on a CPU of a config for GPUs: its speed and its memory say nothing about GPUs.",
        "The run needed 3.0 GiB of memory, 1.0 GiB were predicted.",
        "Rows were left out: 2 of one (too long), 1 of one (cannot be used).",
        "Samples were cut at 2,048 tokens (max_length): 100% of one.",
    ]


def test_a_share_is_measured_without_the_slow_first_step(tmp_path):
    run = read_reported_run(make_run(tmp_path, [step_row(1, data_wait_share=0.9), step_row(2, data_wait_share=0.1)]))
    assert mean(run, "data_wait_share") == 0.1 and mean(run, "absent") is None


def test_of_many_data_sets_a_few_are_named(tmp_path):
    data = record()["data"] | {"sources": [{"name": f"d{i}", "num_samples": 10, "num_truncated": 9} for i in range(7)]}
    [remark] = remarks(opened(tmp_path, [falling(1)], data=data))
    assert remark.endswith(": 90% of d0, 90% of d1, 90% of d2, 90% of d3, 90% of d4 and 2 more.")
