"""Each step stands once in ``metrics.jsonl``, exactly, whatever happened before; only the main process writes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kit import log as log_module
from kit.config import Recipe
from kit.evaluate import Answer, Evaluation
from kit.feed import GlobalBatch
from kit.log import Log, new_state
from kit.step import StepResult


def batch(num_tokens, num_sources=1):
    """Of which a half is supervised; all of the first source."""
    counts = np.array([num_tokens] + [0] * (num_sources - 1))
    return GlobalBatch([], counts / 2, counts // 2, counts, epoch=0.5, places=[])


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(log_module.time, "perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def start(tmp_path, clock):
    """Starts a log whose ``run(steps)`` takes a second and 100 tokens for each step."""

    def start(step=0, total=10, is_main=True, evaluations=({}, {}), names=("one",), **settings):
        recipe = Recipe(model_name_or_path="m", dataset="d", **settings)
        first, last = evaluations
        state = new_state() | {"step": step, "first_evaluation": first, "last_evaluation": last}
        log = Log(SimpleNamespace(is_main_process=is_main), recipe, tmp_path, state, total, names)

        def run(steps):
            for done in steps:
                clock.now += 1.0
                log.step(done, batch(100, len(names)), StepResult(2 / 3 + done, 1.0, [0.5, 7.0]), 1e-5 / 3)

        log.run = run
        return log

    return start


@pytest.fixture
def rows(tmp_path):
    return lambda: [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def steps(rows):
    return [row["step"] for row in rows()]


def evaluation(loss, **more):
    return Evaluation({"eval_loss": loss, "eval_perplexity": 2.0, "eval_tokens": 7, **more})


def test_numbers_are_written_in_full(start, rows):
    start().run([1])
    (row,) = rows()
    assert (row["loss"], row["learning_rate"]) == (2 / 3 + 1, 1e-5 / 3)
    assert (row["step"], row["tokens"], row["tokens_per_second"], row["seconds"]) == (1, 100, 100.0, 1.0)


def test_samples_of_a_wild_step_are_named_without_secrets(start, rows, capsys, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "n0t-for-you")
    log = start(loss_spike_ratio=2.0, max_nonfinite_steps=3)
    log.run(range(1, 11))
    named = replace(batch(100, 1), places=["data/n0t-for-you.jsonl:1"])
    for loss in (1e6, float("nan")):
        log.step(11, named, StepResult(loss, 1.0, [0.5]), 1e-5)
    assert [row["samples"] for row in rows()[-2:]] == [["data/***.jsonl:1"]] * 2
    assert capsys.readouterr().out.count("samples: data/***.jsonl:1\n") == 2


def test_of_several_data_sets_each_has_its_own_numbers(start, rows):
    start(names=("code", "chat")).run([1])
    (row,) = rows()
    assert (row["loss/code"], row["tokens/code"], row["supervised_tokens/code"]) == (0.5, 100, 50)
    assert row["tokens/chat"] == 0 and "loss/chat" not in row  # no token of it in this step
    assert row["tokens"] == 100 and row["supervised_tokens"] == 50


def test_after_a_resume_every_step_stands_once(start, rows):
    first = start()
    first.run([1, 2])
    first.evaluation(2, evaluation(1.0))
    first.run([3, 4])
    first.evaluation(4, evaluation(0.5))
    before = rows()
    start(step=2).run([3, 4, 5])
    assert steps(rows) == [1, 2, 2, 3, 4, 5]
    assert rows()[:3] == before[:3]


def test_a_run_from_the_start_keeps_no_old_lines(start, rows):
    first = start()
    first.evaluation(0, evaluation(3.0))
    first.run([1, 2])
    again = start(step=0)
    again.evaluation(0, evaluation(3.0))
    again.run([1])
    assert steps(rows) == [0, 1]


@pytest.mark.parametrize("damage", ['{"step": 3, "lo', '{"step": 3', "{}", "3", "\n", '{"step": null}', "\x00\x00"])
def test_a_line_cut_off_by_a_kill_is_dropped(start, rows, tmp_path, damage):
    start().run([1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(damage)
    start(step=2).run([3])
    assert steps(rows) == [1, 2, 3]


def test_a_line_cut_off_within_a_character_is_dropped(start, rows, tmp_path):
    start().run([1])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write("ä".encode()[:1])
    start(step=1).run([2])
    assert steps(rows) == [1, 2]


def test_other_ranks_write_and_say_nothing(start, tmp_path, capsys):
    other = start(is_main=False)
    other.run([1, 2])
    other.evaluation(2, evaluation(1.0))
    other.say("something")
    other.close()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_lines_come_every_few_steps_and_after_the_last(start, rows):
    start(logging_steps=4, total=10).run(range(1, 11))
    assert steps(rows) == [4, 8, 10]
    assert [row["tokens_per_second"] for row in rows()] == [100.0, 100.0, 100.0]


def test_time_spent_evaluating_is_no_training_time(start, rows, clock, capsys):
    log = start(total=4)
    log.run([1])
    clock.now += 500
    log.evaluation(1, evaluation(1.0))
    log.run([2])
    assert [row.get("tokens_per_second") for row in rows()] == [100.0, None, 100.0]
    assert "2 s left" in capsys.readouterr().out.splitlines()[-1]


def test_a_resumed_run_foretells_its_time_from_its_own_steps(start, capsys):
    start(step=50, total=100).run([51])
    assert "step 51/100" in (out := capsys.readouterr().out) and "49 s left" in out


def test_the_summary_goes_from_the_first_evaluation_to_the_last_through_a_resume(start):
    first = start()
    first.evaluation(0, evaluation(3.0, eval_exact_match=0.25))
    first.run([1])
    first.evaluation(1, evaluation(2.0, eval_exact_match=0.5))
    kept = json.loads(json.dumps(first.state(1, {})))
    assert kept["step"] == 1
    again = start(step=1, evaluations=(kept["first_evaluation"], kept["last_evaluation"]))
    again.evaluation(2, evaluation(1.0, eval_exact_match=1.0))
    assert again.summary() == [
        "eval_loss: 3.0000 -> 1.0000",
        "eval_perplexity: 2.0000 -> 2.0000",
        "eval_exact_match: 0.2500 -> 1.0000",
    ]


def test_one_evaluation_is_no_comparison(start):
    log = start()
    log.evaluation(1, evaluation(3.0))
    assert log.summary() == []


def test_answers_are_shown_on_one_line_each_and_cut_in_the_middle(start, capsys):
    metrics = evaluation(1.0).metrics
    answers = [Answer("a\nb", "yes", " yes "), Answer("start " + "x" * 500 + " end", "yes", "no")]
    start().evaluation(3, Evaluation(metrics, answers))
    lines = capsys.readouterr().out.splitlines()
    assert "    asked    a b" in lines
    long = next(line for line in lines if "start" in line)
    assert long.endswith(" end") and len(long) < 200
    assert [line.endswith("(differs)") for line in lines if "answered" in line] == [False, True]


def test_trackers_get_the_same_numbers(tmp_path, clock):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    pytest.importorskip("tensorboard")
    recipe = Recipe(model_name_or_path="m", dataset="d", report_to="tensorboard", lora_target_modules="q_proj,v_proj")
    try:
        accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=tmp_path)
        log = Log(
            accelerator,
            recipe,
            tmp_path,
            new_state(),
            2,
            ["one"],
        )
        clock.now += 1.0
        log.step(1, batch(10), StepResult(0.5, 1.0, [0.5]), 0.1)
        log.close()
    finally:
        AcceleratorState._reset_state(True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(tmp_path.rglob("events.*")).parent)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5)]
