"""Rollouts in several turns with tools: what the model reads and learns, on every topology, and after every end.

What the model writes is drawn from a list, by the trajectory and the turn. So every kind of turn occurs.
"""

import json
import os
import signal
import sys
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
import os, random, signal

def note(kind):
    file = os.open("{folder}/" + kind, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # processes write at once
    os.write(file, b"x")
    if os.lseek(file, 0, os.SEEK_CUR) == {stop_at}.get(kind):
        os.kill(int(open("{folder}/pid").read()), {sent})

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
            ids = tokenizer(draw.choice(TURNS)).input_ids + [tokenizer.eos_token_id]
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


def test_the_model_reads_results_and_errors_and_rewards_see_the_conversation(trained):
    run = trained("one")
    assert run.status == 0, run.output
    print(run.output, json.dumps(run.rows, indent=1))
    assert 0
