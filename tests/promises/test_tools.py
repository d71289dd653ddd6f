"""Rollouts in several turns with tools: what the model reads and learns, on every topology, and after every end.

What the model writes is drawn from a list, by the trajectory and the turn. So every kind of turn occurs.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from random import Random

import pytest
from helpers import matrix

pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
TURNS = (
    CALL.format("add", '{"a": 1, "b": 2}'),
    CALL.format("add", '{"a": "3", "b": 2}') + "\n" + CALL.format("count", "{}"),
    CALL.format("count", '{"more": 1}'),
    CALL.format("sub", "{}"),
    CALL.format("add", '{"a": [1]}')[:-20],
    "It is 3.",
    "red green",
)
TOOLS = '''
import os, random, signal, time

def note(kind):
    file = os.open("{folder}/" + kind, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # processes write at once
    os.write(file, b"x")
    if os.lseek(file, 0, os.SEEK_CUR) == {stop_at}.get(kind):
        os.kill(int(open("{folder}/pid").read()), {sent})
        time.sleep(60)

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    note("tool")
    return a + b

class Counter:
    def reset(self, messages, **row):
        if messages[0]["content"].startswith("dog"):
            raise ValueError("no dogs")
        self.calls = 0
        return " Go!"

    def count(self):
        """Count."""
        self.calls += 1
        return [self.calls, random.random()]

    def get_reward(self):
        return self.calls + random.random()

def long(expected, answer, row, completion, environment):
    note("reward")
    return len(answer) / 50 + len(completion) + environment.calls
'''
FLAGS = {
    "objective": "grpo",
    "method": "lora",
    "max_length": 1000,
    "max_new_tokens": 100,
    "max_turns": 3,
    "tool_timeout": 60,
    "reward_timeout": 60,
    "num_generations": 4,
    "global_batch_size": 8,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "max_steps": 3,
}


@pytest.fixture
def trained(finetune, model_folder, tmp_path):
    """Train with tools and an environment, which may end the run."""

    def run(name, moment="", stop_at=None, sent=0, **changes):
        folder = tmp_path / f"own-{name}"
        if not folder.exists():
            folder.mkdir()
            (folder / "own.py").write_text(TOOLS.format(folder=folder, stop_at=stop_at or {}, sent=int(sent)))
        own = f"{folder}/own.py"
        flags = {"tools": f"{own}:add", "environment": f"{own}:Counter", "rewards": f"environment,{own}:long"}
        return finetune(name, prepare=partial(script, folder, model_folder, moment), **FLAGS | flags | changes)

    return run


def script(folder, model_folder, moment, rank):
    """In a rank, before the script: what it samples is one of ``TURNS``; and SIGKILL at that moment."""
    from transformers import AutoTokenizer

    import kit.rollouts.sampler
    from kit.rollouts.generation import Completion

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if not rank:
        (folder / "pid").write_text(str(os.getpid()))
    calls = []
    real = kit.rollouts.sampler.generate_answers

    def scripted(generate, requests, **options):
        calls.append(1)
        if moment == "in a turn" and len(calls) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(generate, requests, **options)  # all ranks take part in it
        for i, request in enumerate(requests):
            draw = Random(str(request.key))
            ids = [*tokenizer(draw.choice(TURNS)).input_ids, tokenizer.eos_token_id]
            ids = ids[: request.max_new_tokens]
            found[i] = Completion(ids, ids[-1] == tokenizer.eos_token_id)
        return found

    kit.rollouts.sampler.generate_answers = scripted
    if moment == "in a save" and not rank:

        def audit(event, args):
            if event == "os.rename" and str(args[0]).endswith(".step-00000002.partial"):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)


def adapter(run):
    return (run.folder / "final/adapter_model.safetensors").read_bytes()


ENDS = {"in a turn": {}, "in a tool": {"tool": 5}, "in a reward": {"reward": 13}, "in a save": {}}
SOME_ENDS = {"in a turn": {}, "in a tool": ENDS["in a tool"]}


@pytest.mark.parametrize(
    ("config", "processes", "ends"),
    matrix([("single", 1, SOME_ENDS)], rest=[("single", 1, ENDS), ("ddp", 2, ENDS), ("fsdp", 2, ENDS)]),
)
def test_a_run_that_is_killed_anywhere_continues_as_if_it_had_not_been(trained, config, processes, ends):
    ways = {"config": config, "processes": processes, "save_steps": 1, "async_save": False}
    whole = trained("whole", **ways)
    assert whole.status == 0, whole.output
    for number, (moment, stop_at) in enumerate(ends.items()):
        flags = {"moment": moment, "stop_at": stop_at, "sent": signal.SIGKILL, **ways}
        ended = trained(f"run-{number}", **flags)
        assert ended.status == -9, (moment, ended.output)
        again = trained(f"run-{number}", **flags | {"moment": ""})
        assert again.status == 0 and again.losses == whole.losses, (moment, again.output)
        assert adapter(again) == adapter(whole), moment
        assert [row["reward"] for row in again.rows] == [row["reward"] for row in whole.rows], moment


LOSSES = [
    ("fsdp", {"policy_loss": "gspo", "packing": True, "num_iterations": 2, "beta": 0.1}),
    ("ddp", {"policy_loss": "dr_grpo", "mask_truncated_completions": True, "dynamic_sampling": True}),
    ("ddp", {"policy_loss": "rloo", "beta": 0.1, "packing": True, "method": "full", "learning_rate": 1e-3}),
    ("fsdp1", {"policy_loss": "cispo", "per_device_train_batch_size": 1, "gradient_checkpointing": True}),
]


@pytest.mark.parametrize(("config", "flags"), matrix(LOSSES))
def test_conversations_and_losses_are_those_of_one_process(trained, config, flags, fp32):
    one, several = (
        trained(name, config=fp32[name], processes=number, max_steps=2, **flags)
        for name, number in (("single", 1), (config, 2))
    )
    assert (one.status, several.status) == (0, 0), one.output + several.output
    for row, other in zip(one.rows, several.rows, strict=True):
        for one_shown, other_shown in zip(row["rollout"], other["rollout"], strict=True):
            assert one_shown == other_shown, one.output + several.output
        assert row["tools/calls"] == other["tools/calls"] > 0
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_a_signal_in_an_evaluation_waits_for_no_tool(trained, chat_file):
    evaluated = {"eval_dataset": chat_file, "max_eval_samples": 10, "predict_with_generate": True}
    begun = time.monotonic()
    run = trained("run", stop_at={"tool": 1}, sent=signal.SIGTERM, eval_on_start=True, **evaluated)
    assert run.status == 75 and "stopped by a signal before the first step" in run.output, run.output
    assert time.monotonic() - begun < 45


def test_an_evaluation_plays_the_conversations(trained, chat_file, finetune, model_folder, tmp_path):
    run = trained("run", max_steps=1, eval_dataset=chat_file, max_eval_samples=10, predict_with_generate=True)
    assert run.status == 0, run.output
    row = run.rows[-1]
    assert row["eval_reward"] > 0 and 1 < row["eval_completions/turns"] <= 3 and row["num_answers"] == 10
    answers = row["answers"]
    assert any("\n<|im_start|>user\n<tool_response>" in each["conversation"] for each in answers), answers
    assert all(each["conversation"].endswith(each["text"]) and each["reward"] >= 0 for each in answers)
    assert not any("<tool_response>" in each["prompt"] for each in answers)

    # Scored with its tools and its settings; the code that its run.json names is not run.
    own, typed = tmp_path / "own-run/own.py", tmp_path / "typed.py"
    own.rename(typed)
    own.write_text("raise SystemExit")
    given = {"eval_dataset": chat_file, "max_eval_samples": 10, "predict_with_generate": True, "tools": f"{typed}:add"}
    given |= {"environment": f"{typed}:Counter", "model_name_or_path": run.folder / "final"}
    given |= {"rewards": "environment"}
    scored = finetune.score("scored", prepare=partial(script, tmp_path, model_folder, ""), **given)
    assert scored.status == 0, scored.output
    found = json.loads(scored.output.splitlines()[-1])
    assert 1 < found["eval_completions/turns"] <= 3 and found["eval_reward"] > 0
