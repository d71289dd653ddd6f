"""Conversations with tools: what follows each kind of turn, what is learned, and what rewards are given."""

import time
from contextlib import closing

import pytest
from data_helpers import ADD, ADDER, COUNT, WRITTEN, byte_level_tokenizer, open_recipe_data, template_of, write

from kit.data.feed.data_ranks import Ranks
from kit.preflight.tool_checks import try_environment
from kit.rollouts.generation import Completion
from kit.rollouts.play import play
from kit.rollouts.rollout_metrics import by_reward, lengths
from kit.rollouts.tools.tool_environment import ToolEnvironment
from kit.rollouts.tools.tool_processes import ToolHost
from kit.scoring.own_metric import MetricError
from kit.system.console import progress
from kit.system.errors import UserError

OWN = (
    ADDER
    + '''
import random, time

def wait():
    """Wait."""
    time.sleep(60)

class Counter:
    def reset(self, text, **row):
        if text == "dog":
            raise ValueError("no dogs")
        self.calls = []
        return f" It is a {text}."

    def count(self):
        """Count."""
        self.calls.append(1)
        return {"calls": len(self.calls), "draw": random.random()}

    def get_reward(self):
        return float(len(self.calls))

def judge(expected, answer, row, completion, environment):
    assert environment is None or completion[0]["role"] == "assistant", completion
    roles = [each["role"][0] for each in completion]
    calls = [call["function"]["name"] for each in completion for call in each.get("tool_calls", [])]
    return float(f"{len(roles)}.{len(calls)}") + 100 * (expected == answer)
'''
)
FAILS = "fails"


class Scripted:
    """A sampler: the turns of each trajectory are given."""

    def __init__(self, tokenizer, scripts):
        self._tokenizer, self._scripts = tokenizer, scripts
        self.keys = []

    def sample(self, requests):
        for i, request in enumerate(requests):
            self.keys.append(request.key)
            (_, sample, k), turn = request.key[:3], (*request.key[3:], 0)[0]
            text = self._scripts[sample][k][turn]
            if text == FAILS:
                raise RuntimeError("the sampler fails")
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
            ended = not text.endswith("...")
            yield (
                i,
                Completion([*ids, self._tokenizer.eos_token_id] if ended else ids, ended, [-1.0] * (len(ids) + ended)),
            )


@pytest.fixture
def played(recipe, tmp_path):
    """Play scripted turns: the environment's conversations, as text that is read and text that is learned."""

    def run(scripts, texts=("cat",), shape="chatml", environment=True, **changes):
        write(
            tmp_path / "own.jsonl",
            *(
                {
                    "messages": [{"role": "user", "content": f"Hi {text}"}, {"role": "assistant", "content": "3"}],
                    "text": text,
                }
                for text in texts
            ),
        )
        (tmp_path / "own.py").write_text(OWN)
        own = f"{tmp_path}/own.py"
        flags = {"objective": "grpo", "dataset": f"{tmp_path}/own.jsonl", "tools": [f"{own}:add"], "max_length": 1500}
        flags |= {"dataset_columns": {"text": "ignore"}, "max_turns": 3, "max_new_tokens": 100, "global_batch_size": 8}
        flags |= {"rewards": [f"{own}:judge", *["environment"] * environment]}
        flags |= {"environment": f"{own}:Counter"} if environment else {}
        settings = recipe(**flags | changes)
        tokenizer = byte_level_tokenizer(eos_token="<|im_end|>" if shape == "chatml" else "<|eot_id|>")
        tokenizer.chat_template = template_of(shape, tokenizer)
        host = ToolHost(settings)
        data = open_recipe_data(settings, tokenizer, tools=host.schemas())
        host.close()
        sampler = Scripted(tokenizer, scripts)
        with closing(ToolEnvironment(settings, data, data.train, tokenizer)) as tools:
            started = [tools.start((0, i, k)) for i, of_sample in enumerate(scripts) for k in range(len(of_sample))]
            found = play(tools, sampler, started, settings.max_new_tokens, lambda i: (), Ranks(), progress)
        for each in found:
            each.text = [(tokenizer.decode(ids), weight) for ids, weight in each.segments]
            assert len(each.logps.get("engine_logps", ())) == each.num_written
        return found, sampler, tools

    return run


def test_an_environment_that_cannot_start_is_refused_with_what_it_is_given(recipe, tmp_path):
    write(tmp_path / "own.jsonl", {"prompt": "Hi", "completion": "3"})
    (tmp_path / "own.py").write_text(OWN)
    settings = recipe(
        objective="grpo", dataset=f"{tmp_path}/own.jsonl", environment=f"{tmp_path}/own.py:Counter", global_batch_size=8
    )
    tokenizer = byte_level_tokenizer(eos_token="<|im_end|>")
    data = open_recipe_data(settings, tokenizer)
    with pytest.raises(UserError, match="missing 1 required positional argument: 'text'") as raised:
        try_environment(settings, data.train, tokenizer)
    assert "the row's columns by name" in str(raised.value)
    write(tmp_path / "own.jsonl", {"prompt": "Hi", "text": "cat"})
    found = []
    for rewards in (["json"], ["json", "environment"]):
        asked = settings.model_copy(update={"rewards": rewards, "dataset_columns": {"text": "ignore"}})
        found.append(try_environment(asked, open_recipe_data(asked, tokenizer).train, tokenizer))
    assert "get_reward of --environment is not used" in found[0][0] and not found[1]


def replied(*results):
    """What the model reads after its call."""
    shown = "".join(f"\n<tool_response>\n{each}\n</tool_response>" for each in results)
    return f"\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n", 0.0


def test_results_follow_calls_and_the_model_reads_what_was_wrong_with_others(played):
    turns = [
        [ADD, "3"],
        [ADD + "\n" + COUNT, COUNT, "4"],
        ["3"],
        [WRITTEN.format("sub", "{}"), "3"],
        [WRITTEN.format("add", '{"a": "1", "b": [2]}'), "3"],
        [ADD[:-20], "3"],
        ["Hello..."],
        [COUNT] * 3,
    ]
    found, sampler, _ = played([turns])
    prompt = found[0].text[0]
    assert prompt[0].endswith("user\nHi cat It is a cat.<|im_end|>\n<|im_start|>assistant\n") and prompt[1] == 0
    end = "<|im_end|>"
    one, two, none, unknown, wrong, malformed, cut, long = ([*each.text[1:]] for each in found)
    assert one == [(ADD + end, 1.0), replied(3), (f"3{end}", 1.0)]
    assert [weight for _, weight in two] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert two[1][0].startswith(replied('3\n</tool_response>\n<tool_response>\n{"calls": 1, "draw": 0.')[0][:90])
    assert '{"calls": 2, ' in two[3][0]
    assert none == [(f"3{end}", 1.0)] and cut == [("Hello...", 1.0)]
    assert unknown[1] == replied("error: there is no tool 'sub', only add, count")
    assert "error: add: argument b: Input should be a valid integer" in wrong[1][0]
    assert "error: malformed call: " in malformed[1][0]
    assert len(long) == 5  # nothing follows the last turn
    assert [each.outcome for each in found] == ["ended"] * 6 + ["max_new_tokens", "max_turns"]
    counts = [tuple(each.counts.values()) for each in found]
    assert counts == [(2, 1, 0), (3, 3, 0), (1, 0, 0), (2, 1, 1), (2, 1, 1), (2, 1, 1), (1, 0, 0), (3, 3, 0)]
    assert sampler.keys[:9] == [*((0, 0, k) for k in range(8)), (0, 0, 0, 1)]
    # Messages, calls, and 100 for the expected answer; the environment's own reward: also of a call in the last turn.
    assert [each.rewards for each in found] == [
        [103.1, 0.0], [6.3, 2.0], [101.0, 0.0], [103.1, 0.0], [103.1, 0.0], [103.0, 0.0], [1.0, 0.0], [6.3, 3.0],
    ]  # fmt: skip
    assert found[0].reward == 103.1
    again = played([turns])[0]
    assert [each.ids for each in again] == [each.ids for each in found]  # the tool's own draws, too


def test_a_conversation_ends_where_another_turn_would_not_fit(played):
    found, *_ = played([[[ADD, "3"], ["3"]]], max_length=900)
    before = len(found[0].ids) - len(found[0].segments[-1].ids)
    for max_length, outcome in ((before + 100, "ended"), (before + 99, "max_length")):
        short, *_ = played([[[ADD, "3"], ["3"]]], max_length=max_length)
        assert short[0].outcome == outcome, max_length
        assert len(short[0].segments) == (4 if outcome == "ended" else 2)


def test_an_environment_that_cannot_start_leaves_its_row_out_with_the_reason(played):
    found, sampler, tools = played([[["3"]], [["3"]]], texts=("cat", "dog"))
    assert [each.outcome for each in found] == ["ended", "failed"] and sampler.keys == [(0, 0, 0)]
    assert found[1].reward != found[1].reward
    assert found[1].rewards == [f"reset: environment: ValueError: no dogs (row {tools.prompts.origin(1)})"] * 2
    tools.say_failures(found)
    assert lengths(found) == lengths(found[:1])  # it was not cut off
    assert by_reward(found, tools.keys)["rewards/environment/failed"] == 1


def test_an_environment_that_cannot_start_is_said_without_rewards(played, capsys):
    found, _, tools = played([[["3"]], [["3"]]], texts=("cat", "dog"), rewards=[])
    tools.say_failures(found)
    assert "warning: reset failed, its completion is dropped: reset: environment: ValueError: no dogs" in (
        capsys.readouterr().out
    )
    with pytest.raises(MetricError, match="no dogs"):
        tools.say_failures(found[1:])


def test_more_trajectories_than_are_played_at_once_are_played_after_each_other(played, monkeypatch):
    turns = [[COUNT, "3"], [ADD, "3"], ["3"]]
    at_once, *_ = played([turns])
    monkeypatch.setattr(ToolEnvironment, "most_played", 2)
    found, sampler, _ = played([turns])
    assert sampler.keys == [(0, 0, 0), (0, 0, 1), (0, 0, 0, 1), (0, 0, 1, 1), (0, 0, 2)]
    assert [each.state() for each in found] == [each.state() for each in at_once]


def test_an_environment_that_is_closed_waits_for_no_call(played, tmp_path):
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="the sampler fails"):
        played(
            [[[WRITTEN.format("wait", "{}")], [FAILS]]], tools=[f"{tmp_path}/own.py:wait"], tool_timeout=60, max_turns=1
        )
    assert time.monotonic() - begun < 30


def test_a_template_with_one_call_in_a_turn_refuses_several(played):
    call = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    found, *_ = played([[[call, "3"], [f"{call}; {call}", "3"]]], shape="llama31", environment=False)
    assert "3" in found[0].text[2][0] and "error: several calls in a turn: write one" in found[1].text[2][0]
    assert [each.counts["tools/failures"] for each in found] == [0, 1]
    assert [each.rewards for each in found] == [[103.1], [103.2]]


def test_columns_that_need_a_mapping_are_named_also_with_tools(typed_here, model_folder, tmp_path):
    write(tmp_path / "own.jsonl", {"question": "1 + 2?", "answer": "3"})
    (tmp_path / "own.py").write_text(OWN)
    flags = f"--model_name_or_path {model_folder} --dataset {tmp_path}/own.jsonl --objective grpo --rewards number"
    status, _, said = typed_here(f"recipes/finetune.py --dry_run {flags} --tools {tmp_path}/own.py:add")
    assert status == 2 and "-> --dataset_columns question=instruction,answer=output" in said, said
