"""A run that learns from rewards: stopped in the middle of one, with rewards that fail, and with nothing to learn.

Its topologies, methods and losses: tests/promises/test_whole_way.py.
"""

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow

OWN = """
import os, signal

def letters(expected, answer, row):
    calls = int(open("calls").read()) + 1 if os.path.exists("calls") else 1
    open("calls", "w").write(str(calls))
    if calls == {stop_at}:
        os.kill(os.getppid(), signal.SIGTERM)
    if calls in {fails}:
        raise KeyError("no such column")
    return sum(map(ord, answer)) % 97 / 97
"""
TINY = ROOT / "recipes/tiny"
FLAGS = {
    "model_name_or_path": TINY / "model",
    "dataset": TINY / "train.jsonl",
    "method": "lora",
    "objective": "grpo",
    "max_length": 128,
    "max_new_tokens": 8,
    "num_generations": 4,
    "global_batch_size": 8,
    "per_device_train_batch_size": 4,
    "num_iterations": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
}


@pytest.fixture
def trained(finetune, tmp_path, monkeypatch):
    """Train with a reward that stops the run in call ``stop_at`` of all, and fails in the calls ``fails``."""

    def run(name, stop_at=0, fails=(), **changes):
        folder = tmp_path / f"own-{name}"
        if not folder.exists():
            folder.mkdir()
            text = OWN.format(stop_at=stop_at, fails=list(fails)).replace('"calls"', repr(str(folder / "calls")))
            (folder / "own.py").write_text(text)
        return finetune(name, **FLAGS | {"rewards": f"{folder / 'own.py'}:letters"} | changes)

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    return run


def adapter(run):
    return (run.folder / "final/adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(("stop_at", "after"), [(10, 2), (3, 0)])
def test_a_run_stopped_in_a_rollout_continues_as_if_it_had_not_been(trained, stop_at, after):
    whole = trained("whole")
    assert whole.status == 0, whole.output
    stopped = trained("half", stop_at=stop_at)  # 8 answers are judged in a rollout
    assert stopped.status == 75 and (f"after step {after} of 4" in stopped.output) == bool(after), stopped.output
    again = trained("half")
    assert again.status == 0 and again.losses == whole.losses, again.output
    assert adapter(again) == adapter(whole)


def test_an_answer_whose_reward_fails_is_left_out_and_named_and_without_any_reward_the_run_stops(trained):
    run = trained("some", fails=[2, 5], max_steps=1)
    assert run.status == 0 and "own.py:10: KeyError: 'no such column' (row " in run.output, run.output
    assert "reward letters failed 2 times" in run.output
    row = run.rows[0]
    assert row["rewards/letters/failed"] == 2 and 0 < row["supervised_tokens"] <= 6 * 8
    none = trained("none", fails=range(9, 999))
    assert none.status == 2 and "no answer of this rollout has a reward" in none.output, none.output
    assert (none.folder / "checkpoints/step-00000002").is_dir()


def test_wrong_combinations_are_refused_before_the_model_is_loaded(trained):
    for changes, words in (
        ({"global_batch_size": 6}, "6 answers a step, in groups of num_generations 4"),
        ({"rewards": None}, "rewards: none given"),
        ({"beta": 0.1, "method": "full"}, "the reference, which is the start, would be a second model"),
        ({"max_new_tokens": 128}, "128 tokens of prompt and answer"),
        ({"max_length": 110, "max_new_tokens": 100}, "leaves less than max_new_tokens of max_length"),
        ({"epsilon": 0.2, "epsilon_high": 0.3, "objective": "sft"}, "epsilon_high: objective sft does not read it"),
    ):
        run = trained("refused", **changes)
        assert run.status == 2 and words in run.output, (changes, run.output)
        assert "Traceback" not in run.output and not (run.folder / "run.json").exists()
