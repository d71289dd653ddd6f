"""Tool calls are read from answers as the chat template writes them, or refused before the model is loaded."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from data_helpers import GOLDEN, WEATHER, byte_level_tokenizer, open_recipe_data, template_of
from preflight_helpers import ONE_PROCESS
from torch import nn

from kit.config.recipe import Recipe
from kit.data.feed.data_ranks import Ranks
from kit.evaluate import evaluate, try_metrics
from kit.model.build import open_config
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.preflight import preflight
from kit.rollouts.generation import CACHE
from kit.rollouts.tools.tool_calls import MalformedCall, call_reader
from kit.scoring.metrics import Metric
from kit.system.errors import UserError
from kit.tasks.objectives import build_objective
from kit.train.policy import Policy


def _template(call):
    """A template in which ``call`` is what writes a call."""
    return (
        "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
        "{%- if loop.first and tools %}{{ tools | tojson }}{% endif %}"
        "{%- for call in message.tool_calls or [] %}{%- set call = call.function %}" + call + "{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


WRITTEN = {
    "coder": _template(
        "{{ '<tool_call>\n<function=' + call.name + '>\n' }}{%- for name, value in call.arguments.items() %}"
        "{{ '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}"
        "{% endfor %}{{ '</function>\n</tool_call>' }}"
    ),
    "glm": _template(
        "{{ '<tool_call>' + call.name }}{%- for name, value in call.arguments.items() %}{{ '\n<arg_key>' + name + "
        "'</arg_key>\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>\n' }}"
        "{% endfor %}{{ '</tool_call>' }}"
    ),
    "tekken": _template("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}"),
    "unknown": _template("{{ '<call>' + call.name + '>' + call.arguments | tojson + '</call>' }}"),
    "harmony": """{%- for message in messages %}{{ '<|start|>' + message.role }}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|message|>' + message.content + (tools | tojson if loop.first and tools else '') + '<|end|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
}
A, B = ("add", {"a": 1}), ("go", {"to": ["x", None], "far": "<b> } [\"'"})
NOTHING: list = []
BAD = "malformed"
# By template: answers, and their calls.
ANSWERS = {
    "chatml": [
        ('Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> Done.', [A]),
        (
            f"<tool_call>{json.dumps({'name': B[0], 'arguments': B[1]})}</tool_call>\n"
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
            [B, A],
        ),
        ('<think>I try <tool_call>{"x"</tool_call></think>Four.', NOTHING),
        ('<think>Cut off: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', NOTHING),
        ('{"name": "add", "arguments": {"a": 1}}', NOTHING),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', BAD),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', BAD),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}} and</tool_call>', BAD),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', BAD),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', BAD),
        ('<tool_call>["add"]</tool_call>', BAD),
        ("<tool_call>" + "[" * 100_000, BAD),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>', BAD),
    ],
    "llama3": [
        ('{"name": "add", "parameters": {"a": 1}}', [A]),
        ('<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}', [A]),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}', [A, A]),
        ('It is {"name": "add", "parameters": {"a": 1}}', NOTHING),
        ('{"sum": 4}', NOTHING),
        ('{"name": "Ann"}', BAD),
        ('{"name": "add", "parameters": {"a": 1}} is it', BAD),
    ],
    "mistral_v3": [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "123456789"}]', [A]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]', [A, A]),
        ("[TOOL_CALLS] none", BAD),
    ],
    "tekken": [
        ('Well.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}', [A, A]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1', BAD),
        ("[TOOL_CALLS]add[ARGS][1]", BAD),
    ],
    "phi4_mini": [('<|tool_call|>{"name": "add", "arguments": {"a": 1}}<|/tool_call|>', [A])],
    "granite": [('Yes.<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]', [A])],
    "coder": [
        ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", [A]),
        (
            "<tool_call>\n<function=f>\n<parameter=a>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>",
            [("f", {"a": "two\nlines"})],
        ),
        ("<tool_call><function=f></function></tool_call>", [("f", {})]),
        ("<tool_call><function=f><parameter=a>1</function></tool_call>", BAD),
        ("<tool_call>f</tool_call>", BAD),
    ],
    "glm": [
        ("<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [A]),
        ("<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>", BAD),
    ],
    "harmony": [
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', [A]),
        (
            "<|channel|>analysis<|message|>I could call to=functions.add now.<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
            [A],
        ),
        ("<|channel|>final<|message|>Four.", NOTHING),
        (" to=functions.add<|channel|>commentary json<|message|>{", BAD),
    ],
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer(bos_token="<s>")


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_read_in_the_form_of_the_template(name, tokenizer):
    reader = call_reader(tokenizer, WRITTEN.get(name) or template_of(name, tokenizer))
    for answer, calls in ANSWERS[name]:
        try:
            found = reader.read("", answer)
        except MalformedCall:
            found = BAD
        assert found == calls, answer


def test_reasoning_that_the_prompt_opened_is_passed_over(tokenizer):
    reader, call = call_reader(tokenizer, template_of("chatml", tokenizer)), ANSWERS["chatml"][0][0]
    assert reader.read("<|im_start|>assistant\n<think>\n", f"{call}</think>Four.") == NOTHING
    assert reader.read("<|im_start|>assistant\n<think>\n", f"Hm.</think>{call}") == [A]


def test_the_response_template_of_the_tokenizer_comes_first(tokenizer):
    own = byte_level_tokenizer(bos_token="<s>")
    with pytest.raises(UserError, match="the template writes a call in an unknown form: '<call>probe_call>"):
        call_reader(own, WRITTEN["unknown"])
    own.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<call>(?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": ["<|im_end|>"], "content": "text"},
        },
    }
    reader = call_reader(own, WRITTEN["unknown"])
    prompt = "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n"
    assert reader.read(prompt, 'Yes.<call>add>{"a": 1}</call>') == [A] and reader.read(prompt, "Four.") == NOTHING
    for answer in ('<call>add>{"a": </call>', "<call>add>[1]</call>"):
        with pytest.raises(MalformedCall):
            reader.read(prompt, answer)


@pytest.mark.parametrize("name", ["plain", "phi35", "qwen3_thinking", "llama2"])
def test_a_template_that_writes_no_calls_is_refused(name, tokenizer):
    with pytest.raises(UserError, match="the template writes no call"):
        call_reader(tokenizer, template_of(name, tokenizer))


def test_calls_are_compared_as_json_in_their_order(tokenizer):
    reader = call_reader(tokenizer, template_of("chatml", tokenizer))

    def equal(expected, answer):
        texts = ["".join(f"<tool_call>{call}</tool_call>" for call in calls) for calls in (expected, answer)]
        return reader.equal("", *texts)

    one, two = '{"name": "f", "arguments": {"a": 1, "b": [true]}}', '{"name": "g", "arguments": {}}'
    assert equal([one], ['{"arguments": {"b": [true], "a": 1.0}, "name": "f"}']) == 1
    assert equal([one, two], [one, two]) == 1 and equal([one, two], [two, one]) == equal([one, two], [one]) == 0
    for changed in (one.replace("true", "1"), one.replace("1", '"1"'), one.replace('"f"', '"g"'), one[:-1], "no"):
        assert equal([one], [changed]) == 0, changed
    deep = '{"name": "f", "arguments": {"a": %s}}' % ("[" * 900 + "]" * 900)
    assert equal([one], [deep]) == equal([one], [f"[{deep}, 1]"]) == 0
    assert equal([one], []) == equal([], [one]) == equal([], ["no"]) == 0 and np.isnan(equal([], []))


def test_answers_that_neither_call_nor_should_are_passed_over():
    metric, nan = Metric("tool_calls", lambda *texts: 1.0), np.nan
    drawn = np.array([[[1.0], [0.0]], [[nan], [nan]], [[nan], [0.0]]])
    found = metric.results(drawn)
    assert {key: metric.result(value) for key, value in found.items()} == {"tool_calls": 0.25, "tool_calls/pass@2": 0.5}
    assert np.isfinite(metric.bounds(found["tool_calls"])).all()


def _rows(num, calls):
    """Questions about the weather, of which those with the numbers ``calls`` are answered by a call."""
    for i in range(num):
        answer = {"role": "assistant", "content": "Sunny."}
        if i in calls:
            answer = {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": f"c{i}"}}]}
        yield {"messages": [{"role": "user", "content": f"Weather in c{i}?"}, answer], "tools": [WEATHER]}


class _Scripted(nn.Module):
    """Answers each prompt with the text that belongs to the place in it."""

    def __init__(self, config, tokenizer, answer):
        super().__init__()
        self.config, self.tokenizer, self.answer = config, tokenizer, answer

    def forward(self, targets, **inputs):
        return torch.tensor(1.0)

    def generate(self, input_ids, max_new_tokens, pad_token_id, eos_token_id=None, **options):
        if eos_token_id is None:  # of the prompts alone: it has no keys and values
            return {CACHE: None}
        rows = []
        for prompt in self.tokenizer.batch_decode(input_ids):
            i = int(prompt.rpartition("Weather in c")[2].partition("?")[0])
            ids = self.tokenizer(self.answer(i), add_special_tokens=False).input_ids
            rows.append(torch.tensor([*ids, eos_token_id[0]]))
        rows = nn.utils.rnn.pad_sequence(rows, True, pad_token_id)
        return SimpleNamespace(sequences=torch.cat([input_ids, rows], dim=1))


def _recipe(model_folder, path, **changes):
    given = {"method": "lora", "max_length": 1024, "predict_with_generate": True, "max_new_tokens": 200}
    given |= {"dataset": str(path), "eval_dataset": str(path), "metrics": ["tool_calls"], "dataset_num_proc": 1}
    return Recipe(model_name_or_path=str(model_folder), **given | changes)


def test_an_evaluation_counts_equal_calls_among_the_answers_that_call_or_should(model_folder, tmp_path):
    """8 should call, of which 5 do so rightly; of 12 others one calls."""
    path = tmp_path / "calls.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows(20, range(8))))
    recipe = _recipe(model_folder, path)
    tokenizer = open_tokenizer(recipe)
    samples = open_recipe_data(recipe.model_copy(update={"eval_dataset": None}), tokenizer, 320).train
    try_metrics(recipe, samples, tokenizer, tokenizer.chat_template)

    def answer(i):
        call = json.dumps({"arguments": {"city": {5: "c4", 6: "C6"}.get(i, f"c{i}")}, "name": "weather"})
        return f"I look.\n<tool_call>\n{call}\n</tool_call>" if i < 7 or i == 19 else "Sunny."

    policy = Policy(
        Accelerator(cpu=True),
        Ranks(),
        _Scripted(open_config(recipe), tokenizer, answer),
        None,
        None,
        tokenizer=tokenizer,
    )
    data = SimpleNamespace(evaluation=samples, mismatched=lambda samples: None)
    result = evaluate(policy, build_objective(recipe, samples.dataset_names), data, recipe)
    assert result.metrics["eval_tool_calls"] == pytest.approx(5 / 9)
    assert result.metrics["eval_exact_match"] == 11 / 20
    low, high = result.intervals["eval_tool_calls"]
    assert 0 < low < 5 / 9 < high < 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"calls": ()}, "no conversation to evaluate on ends with a call"),
        ({"chat_template": str(GOLDEN / "plain.jinja"), "calls": ()}, "the template writes no call"),
        ({"text": "<tool_call>oops</tool_call>"}, r"calls.jsonl:3: its last answer has a malformed call"),
    ],
    ids=["no call", "no form", "malformed"],
)
def test_what_cannot_be_compared_is_refused_before_the_model_is_loaded(model_folder, tmp_path, changes, message):
    path, changes = tmp_path / "calls.jsonl", dict(changes)
    rows = list(_rows(4, changes.pop("calls", (0,))))
    rows[2]["messages"][-1]["content"] = changes.pop("text", "Sunny.")
    if "chat_template" in changes:
        rows = [{"messages": row["messages"]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=message):
        preflight.check(_recipe(model_folder, path, **changes), ONE_PROCESS)
