"""Each step has exactly one line in ``metrics.jsonl``, also after a crash; only the main process writes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.config.recipe import Recipe
from kit.data.feed.feed import GlobalBatch
from kit.evaluate import Evaluation
from kit.run import throughput as throughput_module
from kit.run.log import Log
from kit.tasks.sft.loss import SupervisedLoss
from kit.train.loop_state import LoopState
from kit.train.step import StepResult


def batch(num_tokens, num_datasets=1):
    """Of which a half is supervised; all of the first source."""
    counts = np.array([num_tokens] + [0] * (num_datasets - 1))
    return GlobalBatch([], counts / 2, counts // 2, counts, epoch=0.5, origins=["d.jsonl:7"])


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(throughput_module.time, "perf_counter", lambda: clock.now)
    return clock


def step_with(log, step, loss, grad_norm=1.0, of=None, rate=1e-3, metrics=None):
    """As the loop logs a step."""
    result = StepResult(loss, grad_norm, metrics or {})
    log.step(of or batch(100), result, rate, log.state.end_step(step, result, log.recipe.loss_spike_ratio))


def evaluate(log, step, evaluation):
    """As the loop logs an evaluation. Returns whether it is the best so far."""
    log.state.step = step
    log.evaluation(step, evaluation)
    return log.state.end_evaluation(step, evaluation.metrics)


def kept(log):
    """The state that a checkpoint of now gives back."""
    return LoopState.from_record(json.loads(json.dumps(log.state.record())))


@pytest.fixture
def start(tmp_path, clock):
    """Starts a log whose ``run(steps)`` takes a second and 100 tokens for each step."""

    def start(step=0, total=10, is_main=True, state=None, names=("one",), evaluated=-1, **settings):
        recipe = Recipe(model_name_or_path="m", dataset="d", **settings)
        state = state or LoopState(step=step, evaluated_step=evaluated)
        log = Log(
            SimpleNamespace(is_main_process=is_main, num_processes=1, process_index=0, device=torch.device("cpu")),
            recipe,
            tmp_path,
            state,
            total,
            names,
        )
        objective = SupervisedLoss(names)

        def run(steps):
            for done in steps:
                clock.now += 1.0
                of = batch(100, len(names))
                metrics = objective.metrics([25.0] + [0.0] * (len(names) - 1), of)  # 0.5 for each supervised token
                metrics.pop("loss")
                step_with(log, done, 2 / 3 + done, of=of, rate=1e-5 / 3, metrics=metrics)

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


def test_samples_of_a_wild_step_are_named_without_secrets(start, rows, capsys, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "n0t-for-you")
    log = start(loss_spike_ratio=2.0, max_nonfinite_steps=3)
    log.run(range(1, 11))
    named = replace(batch(100, 1), origins=["data/n0t-for-you.jsonl:1"])
    for loss in (1e6, float("nan")):
        step_with(log, 11, loss, of=named)
    assert [row["samples"] for row in rows()[-2:]] == [["data/***.jsonl:1"]] * 2
    assert capsys.readouterr().out.count("samples: data/***.jsonl:1\n") == 2
    assert "NaN" not in log.path.read_text()  # which is no JSON


def test_a_line_cut_off_by_a_kill_is_dropped(start, rows, tmp_path):
    for damage in (b'{"step": 3, "lo', b"3", "ä".encode()[:1]):
        start().run([1, 2])
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(damage)
        start(step=2).run([3])
        assert steps(rows) == [1, 2, 3]


@pytest.mark.parametrize(("settings", "times"), [({}, 1), ({"packing": True}, 0), ({"objective": "embed"}, 0)])
def test_a_run_that_pads_much_says_once_what_packing_leaves_out(start, capsys, settings, times):
    log = start(total=40, **settings)
    padded = SimpleNamespace(input_ids=torch.zeros(2, 50), num_tokens=70, targets=[0] * 20, squared_lengths=2450)
    for step in range(1, 31):
        step_with(log, step, 1.0, of=replace(batch(70), micro_batches=[padded]))
    said = capsys.readouterr().out
    assert said.count("note: 30% of the computed tokens are padding, which --packing true leaves out") == times


def test_other_ranks_write_and_say_nothing(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    other = start(is_main=False)
    other.run([1, 2])
    other.evaluation(2, evaluation(1.0))
    other.end(stopped="", notes=["something"])
    other.end(stopped="a signal")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_answers_that_did_not_end_are_reported_but_not_of_the_base(start, capsys):
    counts = {"num_answers": 35, "num_truncated_answers": 30}
    log = start()
    for step in (0, 3):
        result = Evaluation(evaluation(1.0).metrics, [], counts, ["<|im_end|>"])
        log.evaluation(step, result)
        log.state.end_evaluation(step, result.metrics)
    base, trained = capsys.readouterr().out.split("evaluation after 3 steps")
    assert "did not end" not in base and "warning: 30 of 35 answers did not end" in trained


@pytest.fixture
def tensorboard(tmp_path):
    """Starts logs that write to TensorBoard; and what it then shows of the loss."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    pytest.importorskip("tensorboard")
    recipe = Recipe(model_name_or_path="m", dataset="d", report_to="tensorboard", lora_target_modules="q_proj,v_proj")

    def start(state):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=tmp_path)
        return Log(accelerator, recipe, tmp_path, state, 4, ["one"])

    def shown(tag="loss"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "kit")).Reload()
        return [(event.step, event.value) for event in events.Scalars(tag)]

    yield start, shown
    AcceleratorState._reset_state(True)


def test_tensorboard_has_each_evaluation_once_and_the_settings_once_however_often_it_is_resumed(
    tensorboard, tmp_path, clock
):
    start, shown = tensorboard
    log = start(LoopState())
    evaluate(log, 0, evaluation(3.0))
    log.end(stopped="")  # killed before there was a checkpoint
    folders = sorted((tmp_path / "kit").iterdir())
    log = start(LoopState())
    evaluate(log, 0, evaluation(3.0))
    step_with(log, 1, 0.5)
    step_with(log, 2, 1.0)
    stopped = kept(log)  # by a signal, before the evaluation of this step
    log.end(stopped="")
    log = start(replace(stopped))
    evaluate(log, 2, evaluation(2.0))
    evaluated = kept(log)
    step_with(log, 3, 1.5)
    log.end(stopped="")
    log = start(evaluated)  # nor is one lost that is not run again
    step_with(log, 3, 2.5)
    log.end(stopped="")
    assert shown("eval_loss") == [(0, 3.0), (2, 2.0)] and shown() == [(1, 0.5), (2, 1.0), (3, 2.5)]
    assert [path for path in sorted((tmp_path / "kit").iterdir()) if path.is_dir()] == [
        path for path in folders if path.is_dir()
    ]
    assert len(list((tmp_path / "kit").rglob("hparams.yml"))) == 1


def test_a_loss_far_above_the_usual_is_reported_with_its_samples_through_a_resume(start, rows, capsys):
    log = start(loss_spike_ratio=3.0, logging_steps=100, total=1000)
    for step in range(1, 12):
        step_with(log, step, 2.0)
    assert rows() == []
    again = start(state=kept(log), loss_spike_ratio=3.0, logging_steps=100, total=1000)
    step_with(again, 12, 5.9)
    step_with(again, 13, 6.1)
    step_with(again, 14, 2.0)
    (row,) = rows()
    assert (row["step"], row["samples"]) == (13, ["d.jsonl:7"]) and row["loss_spike"] == pytest.approx(3.05)
    text = "warning: step 13: loss 6.1000 is 3.0 times the median of the last 12 steps; samples: d.jsonl:7"
    assert text in capsys.readouterr().out
