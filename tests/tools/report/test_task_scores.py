"""Scores on tasks stay in the run's folder, and the report has them beside those of the base."""

import pytest

from kit.run.output_dir import outputs
from kit.run.record import TASKS_FILE
from kit.tools.report.task_scores import add_task_scores, read_task_scores, task_scores_section


def row(step, value, is_base=False, num_fewshot=0, **changes):
    scores = {"acc,none": value, "acc_stderr,none": 0.01, "f1,strict": value}
    task = {"version": 1.0, "num_fewshot": num_fewshot, "num_samples": 40, "scores": scores}
    return {"step": step, "model": "m", "is_base": is_base, "chat_template": True, "tasks": {"<arc>": task}} | changes


def test_scores_stand_beside_those_of_the_base(tmp_path):
    assert task_scores_section(tmp_path) == ""
    add_task_scores(tmp_path, [row(160, 0.5)])
    add_task_scores(tmp_path, [row(0, 0.25, is_base=True)])
    page = task_scores_section(tmp_path)
    assert page.index(">base<") < page.index(">after step 160<")
    first = page.index("0.2500 ± 0.0100")
    assert first < page.index("0.5000 ± 0.0100") and "&lt;arc&gt;" in page and "<arc>" not in page
    assert "f1 (strict)" in page and "acc_stderr" not in page
    assert "0-shot, 40 samples, chat template, version 1.0" in page


@pytest.mark.parametrize("changes", [{"num_fewshot": 5}, {"chat_template": False}, {"system_prompt": "Be brief."}])
def test_scores_that_do_not_compare_are_in_rows_of_their_own(tmp_path, changes):
    add_task_scores(tmp_path, [row(0, 0.25, is_base=True), row(9, 0.5)])
    together = task_scores_section(tmp_path).count("<tr>")
    add_task_scores(tmp_path, [row(9, 0.75, **changes)])
    assert task_scores_section(tmp_path).count("<tr>") == together + 2  # of two metrics
    add_task_scores(tmp_path, [row(9, 0.125)])  # asked as before: the last one counts
    assert "0.1250 ± 0.0100" in task_scores_section(tmp_path) and "0.5000" not in task_scores_section(tmp_path)


def test_of_many_checkpoints_the_base_and_the_last_are_shown(tmp_path):
    add_task_scores(tmp_path, [row(0, 0.25, is_base=True), *(row(step, 0.5) for step in range(1, 9))])
    page = task_scores_section(tmp_path)
    assert [f">after step {step}<" in page for step in (5, 6, 8)] == [False, True, True] and ">base<" in page


def test_damaged_lines_are_left_out(tmp_path):
    add_task_scores(tmp_path, [row(9, 0.5)])
    with (tmp_path / TASKS_FILE).open("a") as file:
        file.write('[1]\n{"step": 1, "tasks": 3}\n{"step": true, "tasks": {}}\n')
        file.write('{"step": 7, "tasks": {"a": 1, "b": {"scores": 2}, "c": {"scores": {"x": "y"}}}}\n{"step": 9, "tas')
    assert len(read_task_scores(tmp_path)) == 2
    assert "0.5000" in task_scores_section(tmp_path) and "after step 7" not in task_scores_section(tmp_path)


def test_a_run_that_is_overwritten_takes_its_scores_along(tmp_path):
    assert tmp_path / TASKS_FILE in outputs(tmp_path)
