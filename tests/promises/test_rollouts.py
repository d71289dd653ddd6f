"""A run that learns from rewards: stopped in the middle of one, with rewards that fail, and with nothing to learn.

Its topologies, methods and losses: tests/promises/test_whole_way.py.
"""

import json
import math
import os
import re
import signal
import sys
from functools import partial

import pytest
from helpers import ROOT, matrix

pytestmark = pytest.mark.slow

OWN = """
import os, signal

def letters(expected, answer, row):
    file = os.open("calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # ranks may call at once
    os.write(file, b"x")
    calls = os.lseek(file, 0, os.SEEK_CUR)
    if calls == {stop_at}:
        os.kill(int(open(f"/proc/{{os.getppid()}}/stat").read().split()[3]), {sent})
    if calls in {fails}:
        raise KeyError("no such column")
    return sum(map(ord, answer)) % 97 / 97
"""
TINY = ROOT / "recipes/tiny"
NUM_TOKENS = 1110  # of its vocabulary
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

    def run(name, stop_at=0, sent=0, fails=(), **changes):
        folder = tmp_path / f"own-{name}"
        if not folder.exists():
            folder.mkdir()
            text = OWN.format(stop_at=stop_at, sent=int(sent), fails=list(fails)).replace(
                '"calls"', repr(str(folder / "calls"))
            )
            (folder / "own.py").write_text(text)
        return finetune(name, **FLAGS | {"rewards": f"{folder / 'own.py'}:letters"} | changes)

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    return run


def adapter(run):
    return (run.folder / "final/adapter_model.safetensors").read_bytes()


def die(moment, rank):
    """In a rank, before the script: SIGKILL at that moment. Two steps learn from a rollout; it has two calls."""
    import kit.rollouts.sampler
    import kit.train.step

    def dying(real, number):
        calls = []

        def call(*args, **options):
            calls.append(1)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    if moment == "in a rollout":
        number = 4 // int(os.environ.get("WORLD_SIZE", "1"))
        kit.rollouts.sampler.generate_answers = dying(kit.rollouts.sampler.generate_answers, number)
    if moment == "between the steps of a rollout":
        kit.train.step.train_step = dying(kit.train.step.train_step, 4)
    if moment == "in a save" and not rank:

        def audit(event, args):
            if event == "os.rename" and str(args[0]).endswith(".step-00000003.partial"):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)


# By where a run ends, after how many steps it goes on; 8 answers are judged in a rollout.
STOPS = {"signal in the first rollout": 0, "in a rollout": 2, "between the steps of a rollout": 3, "in a save": 2}
MORE_STOPS = {"signal in a reward": 2, "in a reward": 2}
CALLS = {"signal in the first rollout": 3, "signal in a reward": 10, "in a reward": 12}


@pytest.mark.parametrize(
    ("config", "processes", "stops"),
    matrix([("single", 1, STOPS)], rest=[("single", 1, MORE_STOPS), ("ddp", 2, STOPS), ("fsdp", 2, STOPS)]),
)
def test_a_run_that_ends_anywhere_continues_as_if_it_had_not_ended(trained, config, processes, stops):
    ways = {"config": config, "processes": processes, "save_steps": 1, "per_device_eval_batch_size": 4}
    ways["async_save"] = False  # so that a step that was done is saved
    whole = trained("whole", **ways)
    assert whole.status == 0, whole.output
    for number, (moment, after) in enumerate(stops.items()):
        sent = signal.SIGTERM if "signal" in moment else signal.SIGKILL
        flags = {"stop_at": CALLS.get(moment, 0), "sent": sent, **ways}
        ended = trained(f"run-{number}", prepare=partial(die, moment), **flags)
        assert ended.status == (75 if "signal" in moment else -9), (moment, ended.output)
        own = ended.folder.parent / f"own-run-{number}/own.py"
        own.write_text(own.read_text() + "# edited\n")
        again = trained(f"run-{number}", **flags)
        assert again.status == 0 and again.losses == whole.losses, (moment, again.output)
        assert (f"continuing after step {after} of 4" in again.output) == bool(after), (moment, again.output)
        assert (f"changed since that checkpoint: {own}: " in again.output) == bool(after), again.output
        assert adapter(again) == adapter(whole), moment
        assert [row["reward"] for row in again.rows] == [row["reward"] for row in whole.rows], moment


def test_an_answer_whose_reward_fails_is_left_out_and_named_and_without_any_reward_the_run_stops(trained):
    run = trained("some", fails=[2, 5], max_steps=1)
    assert run.status == 0 and "own.py:11: KeyError: 'no such column' (row " in run.output, run.output
    assert "reward letters failed 2 times" in run.output
    row = run.rows[0]
    assert row["rewards/letters/failed"] == 2 and 0 < row["supervised_tokens"] <= 6 * 8
    none = trained("none", fails=range(9, 999))
    assert none.status == 2 and "no completion of this rollout has a reward" in none.output, none.output
    assert (none.folder / "checkpoints/step-00000002").is_dir()


def test_prompts_alone_are_trained_on_as_those_with_an_answer_are_and_evaluated_by_their_rewards(trained, tmp_path):
    own, path = tmp_path / "named.py", tmp_path / "alone.jsonl"
    own.write_text("def letters(answer, row):\n    return sum(map(ord, answer)) % 97 / 97\n")
    rows = [json.loads(line) for line in FLAGS["dataset"].read_text().splitlines()]
    path.write_text("".join(json.dumps({"prompt": row["messages"][:-1], "more": 1}) + "\n" for row in rows))
    flags = {"rewards": f"{own}:letters", "max_steps": 2, "num_iterations": 1}
    answered = trained("answered", **flags)
    evaluated = {"eval_dataset": path, "max_eval_samples": 5, "predict_with_generate": True, "eval_steps": 1}
    run = trained("alone", **flags | evaluated | {"dataset": path})
    assert answered.status == run.status == 0, run.output
    assert run.losses == answered.losses and adapter(run) == adapter(answered)
    evaluations = [row for row in run.rows if "eval_reward" in row]
    assert len(evaluations) == 2 and not {"eval_loss", "eval_exact_match"} & set(evaluations[0])
    assert all("reward" in each and "reference" not in each for each in evaluations[0]["answers"])
    page = (run.folder / "report.html").read_text()
    assert re.findall("<dt>(.*?)</dt>", page)[:2] == ["evaluation reward", "reward"]
    refused = trained("refused", **flags | {"dataset": path, "rewards": "number"})
    assert refused.status == 2 and f"compares with the reference answer, and {path}:1 has none" in refused.output


def test_rollouts_and_log_probabilities_have_the_temperature_and_the_probability_that_was_cut_is_measured(trained):
    """At 10, tokens are drawn nearly evenly; the entropy of draws at 1 was 5.8, of undivided logits it is far off."""
    flags = {"max_steps": 2, "adapter_name_or_path": TINY / "sft"}
    hot = trained("hot", rollout_temperature=10, **flags)
    greedy = trained("greedy", rollout_top_k=1, **flags)
    for run in (hot, greedy):
        assert run.status == 0 and run.rows[0]["log_ratio"] < 1e-6, run.output  # old and new alike
    assert hot.rows[0]["entropy"] == pytest.approx(math.log(NUM_TOKENS), abs=0.3)
    assert "sampling/cut_probability" not in hot.rows[0] and greedy.rows[0]["frac_reward_zero_std"] == 1
    assert 0.005 < greedy.rows[0]["sampling/cut_probability"] < 0.5, greedy.rows[0]


def test_rloo_takes_the_kl_penalty_off_the_rewards_once_policy_and_reference_differ(trained):
    plain, penalised = (trained(f"rloo-{beta}", policy_loss="rloo", beta=beta) for beta in (None, 10))
    assert plain.status == penalised.status == 0, penalised.output
    assert [row["reward"] for row in plain.rows[:2]] == [row["reward"] for row in penalised.rows[:2]]
    assert plain.losses[:2] == penalised.losses[:2] and abs(penalised.rows[0]["kl"]) < 1e-6
    assert penalised.rows[2]["kl"] and plain.losses[2] != penalised.losses[2]


def note_calls(path, rank):
    """In a rank, before the script: write a byte to the file at each call that generates answers."""
    import kit.rollouts.sampler

    real = kit.rollouts.sampler.generate_answers

    def noting(*args, **options):
        with path.open("a") as file:
            file.write("x")
        return real(*args, **options)

    kit.rollouts.sampler.generate_answers = noting


def test_the_next_answers_are_written_while_rewards_are_computed(trained, tmp_path):
    path, own = tmp_path / "calls", tmp_path / "waiting.py"
    path.touch()
    waits = f"    while answer != expected and os.path.getsize({str(path)!r}) < 2:\n        time.sleep(0.05)\n"
    own.write_text(f"import os, time\n\ndef f(expected, answer, row):\n{waits}    return len(answer) % 5\n")
    flags = {"rewards": f"{own}:f", "per_device_eval_batch_size": 4, "max_steps": 1}
    run = trained("waiting", prepare=partial(note_calls, path), **flags)
    assert run.status == 0 and "reward f failed" not in run.output, run.output


def test_rewards_see_special_tokens_and_a_rule_that_suits_no_expected_answer_is_said(trained, chat_file, tmp_path):
    path = tmp_path / "thoughts.jsonl"
    rows = [{"instruction": f"{i} + 1?", "output": f"<thought>add</thought>{i + 1}"} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rules = ["regex:^<thought>.*</thought>[0-9]+$", "regex:^Answer", "json", f"{tmp_path}/own-thoughts/own.py:letters"]
    flags = {"dataset": path, "new_tokens": "<thought>,</thought>", "rewards": ",".join(rules), "max_steps": 1}
    run = trained("thoughts", **flags)
    assert run.status == 0 and "warning: --rewards regex:^Answer is 0 for the expected" in run.output, run.output
    assert "--rewards json is 0" in run.output and "--rewards regex:^<thought>" not in run.output
    assert "<thought>add</thought>" in (run.folder / "report.html").read_text().replace("&lt;", "<").replace(
        "&gt;", ">"
    )
    pytest.importorskip("math_verify")
    path.write_text("".join(json.dumps(row | {"output": r"\frac{1"}) + "\n" for row in rows[:1]))
    run = trained("math", **flags | {"rewards": "math"})
    assert run.status == 2 and r"thoughts.jsonl:1: math-verify cannot read '\\frac{1'" in run.output, run.output


def test_wrong_combinations_are_refused_before_the_model_is_loaded(trained):
    for changes, words in (
        ({"global_batch_size": 6}, "6 completions a step, in groups of num_generations 4"),
        ({"rewards": None}, "rewards: none given"),
        ({"max_new_tokens": 128}, "128 tokens for prompt and completion"),
        ({"max_length": 110, "max_new_tokens": 100}, "leaves less than max_new_tokens of max_length"),
        ({"epsilon": 0.2, "epsilon_high": 0.3, "objective": "sft"}, "epsilon_high: objective sft does not read it"),
    ):
        run = trained("refused", **changes)
        assert run.status == 2 and words in run.output, (changes, run.output)
        assert "Traceback" not in run.output and not (run.folder / "run.json").exists()
