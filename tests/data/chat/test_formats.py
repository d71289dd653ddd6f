"""Rows as others write them: read as what they mean, or told what is wrong and where."""

import json
import math

import pytest

from kit.data.chat.formats import FIELDS, choose_fields, plain_text, to_sample
from kit.errors import UserError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def sample_of(row, **mapping):
    return to_sample(row, choose_fields(list(row), {theirs: ours for ours, theirs in mapping.items()}, "train.jsonl"))


def messages_of(*messages):
    return sample_of({"messages": list(messages)})["messages"]


def told(row):
    """The problems of a row, one string."""
    problems = sample_of(row)
    assert isinstance(problems, list), f"taken for {problems}"
    return "\n".join(map(str, problems))


# What is read


@pytest.mark.parametrize(
    "sample",
    [
        {"text": "a"},
        {"prompt": "a", "completion": "b"},
        {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
        {"messages": [SYSTEM, USER, ANSWER, USER, ANSWER]},
        {"messages": [ANSWER]},  # a template may refuse that
        {"messages": [USER, ANSWER, {"role": "tool", "content": ""}, {"role": "assistant", "content": "ü 你好"}]},
        {"messages": [USER, ANSWER | {"reasoning_content": "hm", "name": "Ann"}], "tools": [{"name": "add"}]},
        {"messages": [USER, ANSWER | {"weight": 0.5}]},
        {"input_ids": [3, 0, 5]},
        {"input_ids": [3, 0, 5], "labels": [-100, 0, 5]},
    ],
)
def test_what_is_in_our_form_stays_as_it_is(sample):
    assert sample_of(sample) == sample
    other = {"source": "web", "attention_mask": [1], **sample}
    assert sample_of(other) == sample


@pytest.mark.parametrize(
    ("role", "ours"),
    [
        *[(role, "user") for role in ("human", "user")],
        *[(role, "assistant") for role in ("gpt", "chatgpt", "assistant", "model", "bot")],
        *[(role, "tool") for role in ("tool", "observation", "function_response", "ipython")],
    ],
)
def test_sharegpt_speakers_become_roles(role, ours):
    said = [{"from": "system", "value": "Be kind"}, {"from": role, "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert sample_of({"conversations": said}) == {"messages": [SYSTEM, {"role": ours, "content": "Hi"}, ANSWER]}
    said = [{"role": role, "content": "Hi"}, {"role": "gpt", "content": "Hello"}]
    assert sample_of({"conversations": said}) == {"messages": [{"role": ours, "content": "Hi"}, ANSWER]}


def test_sharegpt_keeps_what_is_trained_on_and_takes_the_system_column():
    said = [
        {"from": "human", "value": "Hi", "train": False, "weight": None},
        {"from": "gpt", "value": "Hello", "train": False, "weight": None},
        {"from": "gpt", "value": "Hello", "train": None, "weight": 2},
    ]
    expected = [SYSTEM, USER, ANSWER | {"weight": 0.0}, ANSWER | {"weight": 2.0}]
    assert sample_of({"conversations": said, "system": "Be kind"}) == {"messages": expected}
    assert sample_of({"conversations": said, "system": None}) == {"messages": expected[1:]}


@pytest.mark.parametrize("value", [json.dumps({"name": "add", "arguments": {"a": 1}}), [CALL], json.dumps([CALL])])
def test_sharegpt_function_calls_become_tool_calls(value):
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": value}]}
    assert sample_of(row)["messages"] == [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "Hi", "output": "Hello"}, [USER, ANSWER]),
        ({"instruction": "Hi", "input": " ", "output": "Hello"}, [USER, ANSWER]),
        ({"instruction": "Hi", "input": None, "output": "Hello", "system": ""}, [USER, ANSWER]),
        (
            {"instruction": "Hi", "input": "Ann", "output": "Hello", "system": "Be kind"},
            [SYSTEM, {"role": "user", "content": "Hi\n\nAnn"}, ANSWER],
        ),
    ],
)
def test_alpaca_becomes_messages(row, messages):
    assert sample_of(row) == {"messages": messages}


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        [json.dumps(CALL)],
        [{"name": "add", "arguments": {"a": 1}}],
        [{"name": "add", "arguments": '{"a": 1}'}],
        [{"type": None, "function": {"name": "add", "arguments": '{"a": 1}'}}],
    ],
)
def test_tool_calls_become_objects_in_one_form(calls):
    assert messages_of(USER, {"role": "assistant", "content": None, "tool_calls": calls}) == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]


def test_calls_keep_their_id_and_answers_refer_to_it():
    call, answer = CALL | {"id": "c1"}, {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    calling = {"role": "assistant", "content": "Let me see", "tool_calls": [call]}
    assert messages_of(USER, calling, answer, ANSWER) == [USER, calling, answer, ANSWER]


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_a_call_without_arguments_has_none(arguments):
    calls = [{"name": "now", "arguments": arguments}]
    made = messages_of({"role": "assistant", "tool_calls": calls})
    assert made[0]["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


@pytest.mark.parametrize("tools", ['[{"name": "add", "default": null}]', ['{"name": "add", "default": null}']])
def test_tools_as_json_text_are_parsed_and_keep_their_nulls(tools):
    row = {"messages": [USER, ANSWER], "tools": tools}
    assert sample_of(row)["tools"] == [{"name": "add", "default": None}]


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools_are_left_out(tools):
    assert sample_of({"messages": [USER, ANSWER], "tools": tools}) == {"messages": [USER, ANSWER]}


def test_keys_of_a_message_that_are_null_are_as_if_absent_and_nulls_further_down_are_meant():
    filled = {"tool_calls": None, "name": None, "weight": None, "train": None, "reasoning_content": None}
    assert messages_of(USER | filled, ANSWER | filled) == [USER, ANSWER]
    tools = [{"name": "add", "parameters": {"a": {"type": "int"}, "b": None}}]
    made = sample_of({"messages": [USER, ANSWER], "tools": tools})["tools"]
    assert made == tools


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "H", "image": None}, {"type": "text", "text": "i"}]
    assert messages_of({"role": "user", "content": parts}, ANSWER) == [USER, ANSWER]


@pytest.mark.parametrize(
    ("said", "weight"),
    [
        ({"train": False}, 0.0),
        ({"train": False, "weight": 3}, 0.0),
        ({"train": True}, None),
        ({"weight": 0}, 0.0),
        ({"weight": 2}, 2.0),
        ({"train": True, "weight": 0.25}, 0.25),
    ],
)
def test_what_an_answer_counts_for_is_one_number(said, weight):
    answer = messages_of(USER, ANSWER | said)[1]
    assert answer == (ANSWER if weight is None else ANSWER | {"weight": weight})
    assert type(answer.get("weight", 1.0)) is float


def test_a_developer_is_the_system_and_unknown_keys_are_left_out():
    assert messages_of({"role": "developer", "content": "Be kind"}, USER | {"id": 7}, ANSWER) == [SYSTEM, USER, ANSWER]


def test_all_that_is_said_counts_for_sameness():
    assert plain_text({"text": "a"}) == "a"
    assert plain_text({"prompt": "a", "completion": "b"}) == "a\nb"
    assert plain_text({"prompt": [USER], "completion": [ANSWER]}) == "Hi\nHello"
    assert plain_text({"input_ids": [1]}) == ""
    calls = [{"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]} for call in ("a", "b")]
    assert plain_text(calls[0]) != plain_text(calls[1])
    thoughts = [{"messages": [USER, ANSWER | {"reasoning_content": text}]} for text in ("a", "b")]
    assert plain_text(thoughts[0]) != plain_text(thoughts[1])


# What is refused

BAD_ROWS = [
    ({"prompt": "a", "completion": None}, "completion: null; expected text"),
    ({"prompt": 3, "completion": "b"}, "prompt: a number; expected text"),
    ({"prompt": "a", "completion": " "}, "completion: empty"),
    ({"prompt": "a", "completion": "\ud800"}, "completion: half of a surrogate pair at character 0"),
    ({"prompt": [], "completion": "b"}, "prompt: prompt is a list, completion a text"),
    ({"prompt": [], "completion": []}, "prompt: empty"),
    ({"prompt": [USER], "completion": [USER]}, "completion: no assistant turn"),
    ({"prompt": [USER], "completion": [SYSTEM, ANSWER]}, "completion[0].role: a system message behind others"),
    ({"text": ["a"]}, "text: a list; expected text"),
    ({"instruction": "", "output": "b"}, "instruction: empty"),
    ({"instruction": "a", "output": None}, "output: null"),
    ({"instruction": "a", "output": "b", "input": 3}, "input: a number"),
    ({"instruction": "a", "output": "b", "system": 3}, "system: a number"),
    ({"conversations": [{"from": "humann", "value": "a"}]}, "conversations[0].from: found 'humann'"),
    ({"conversations": [{"from": "humann", "value": "a"}]}, "did you mean 'human'?"),
    ({"conversations": [{"value": "a"}]}, "conversations[0].from: missing"),
    ({"conversations": [{"from": "gpt", "value": None}]}, "conversations[0].value: null"),
    ({"conversations": [{"from": "function_call", "value": "add"}]}, "conversations[0].value: not JSON"),
    ({"conversations": [{"from": "function_call", "value": "3"}]}, "conversations[0].value: a number"),
    ({"conversations": [{"from": "function_call", "value": ""}]}, "conversations[0].value: empty"),
    ({"conversations": [{"from": "gpt"}]}, "conversations[0].value: missing; expected text"),
    ({"conversations": [{"from": "system", "value": "a"}], "system": "b"}, "conversations[0].role: a system message"),
    ({"input_ids": []}, "input_ids: empty"),
    ({"input_ids": "1 2"}, "input_ids: a text; expected a list of ids"),
    ({"input_ids": [1, -1]}, "input_ids[1]: -1; expected a whole number of at least 0"),
    ({"input_ids": [1, 2.0]}, "input_ids[1]: 2.0"),
    ({"input_ids": [True]}, "input_ids[0]: true; expected a whole number"),
    ({"input_ids": [1, None]}, "input_ids[1]: null; expected a whole number"),
    ({"input_ids": [1, 2], "labels": [1]}, "labels: 1 of them for 2 input_ids"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "labels[0]: 2; expected -100, or 1 as in input_ids"),
    ({"input_ids": [1, 2], "labels": [1, 2.0]}, "labels[1]: 2.0"),
    ({"input_ids": [1, 2], "labels": None}, "labels: null; expected a list of ids"),
    ({"messages": [USER, ANSWER], "tools": "add"}, "tools: not JSON"),
    ({"messages": [USER, ANSWER], "tools": {"name": "add"}}, "tools: an object; expected a list of tools"),
    ({"messages": [USER, ANSWER], "tools": [3]}, "tools[0]: a number; expected an object"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_told_with_its_field(row, message):
    assert message in told(row)


BAD_MESSAGES = [
    ("Hi", "messages: a text; expected a list of messages"),
    (None, "messages: null; expected a list of messages"),
    ([], "messages: empty"),
    (["Hi"], "messages[0]: a text; expected an object with role and content"),
    ([USER], "messages: no assistant turn; expected at least one"),
    ([{"role": "asistant", "content": "Hi"}], "messages[0].role: found 'asistant'; expected system, user, assistant"),
    ([{"role": "asistant", "content": "Hi"}], "did you mean 'assistant'?"),
    ([{"role": ["user"], "content": "Hi"}], "messages[0].role: a list; expected system, user"),
    ([{"role": "gpt", "content": "Hi"}], "messages[0].role: found 'gpt'"),  # ShareGPT's belong to conversations
    ([{"content": "Hi"}], "messages[0].role: missing"),
    ([{"role": None, "content": "Hi"}], "messages[0].role: null; expected system, user"),
    ([{"from": "user", "value": "Hi"}], "messages[0].role: missing"),
    ([{"role": "assistant"}], "messages[0].content: missing"),
    ([{"role": "assistant", "content": None}], "messages[0].content: null; expected text"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content: null"),
    ([{"role": "assistant", "content": None, "tool_calls": "[]"}], "messages[0].content: null"),
    ([{"role": "assistant", "content": None, "reasoning_content": "hm"}], "messages[0].content: null"),
    ([USER, {"role": "assistant", "content": " "}], "messages[1].content: empty"),
    ([{"role": "user", "content": ""}, ANSWER], "messages[0].content: empty"),
    ([{"role": "tool", "content": {"sum": 2}}, ANSWER], "messages[0].content: an object; expected text"),
    ([{"role": "tool"}, ANSWER], "messages[0].content: missing"),
    ([{"role": "user", "content": ["Hi"]}, ANSWER], "messages[0].content[0]: not a part with text"),
    ([{"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER], "content[0]: a part of type 'image'"),
    ([{"role": "user", "content": "\ud800"}, ANSWER], "messages[0].content: half of a surrogate pair"),
    ([SYSTEM, SYSTEM, USER, ANSWER], "messages[1].role: a second system message; expected one, first"),
    ([USER, SYSTEM, ANSWER], "messages[1].role: a system message behind others; expected one, first"),
    ([USER, ANSWER | {"train": "yes"}], "messages[1].train: a text; expected true or false"),
    ([USER, ANSWER | {"train": 1}], "messages[1].train: a number; expected true or false"),
    ([USER | {"train": True}, ANSWER], "messages[0].train: true on a turn of the user; expected it on no other"),
    ([USER | {"train": True}, ANSWER], "only assistant turns are learned from"),
    ([USER | {"weight": 1}, ANSWER], "messages[0].weight: 1 on a turn of the user"),
    ([USER, ANSWER | {"weight": "2"}], "messages[1].weight: a text; expected 0, or a number from 1e-30 to 1e30"),
    ([USER, ANSWER | {"weight": True}], "messages[1].weight: true; expected 0, or a number from 1e-30 to 1e30"),
    ([USER, ANSWER | {"weight": -0.5}], "messages[1].weight: -0.5; expected 0, or a number from 1e-30 to 1e30"),
    ([USER, ANSWER | {"weight": math.nan}], "messages[1].weight: nan; expected 0, or a number from 1e-30 to 1e30"),
    ([USER, ANSWER | {"weight": math.inf}], "messages[1].weight: inf"),
    ([USER, ANSWER | {"weight": 10**400}], "messages[1].weight: 1000"),
    ([USER | {"tool_calls": [CALL]}, ANSWER], "messages[0].tool_calls: calls of the user"),
    ([ANSWER | {"tool_calls": "add(1)"}], "messages[0].tool_calls: not JSON"),
    ([ANSWER | {"tool_calls": 3}], "messages[0].tool_calls: a number; expected a list of calls"),
    ([ANSWER | {"tool_calls": [3]}], "messages[0].tool_calls[0]: no call"),
    ([ANSWER | {"tool_calls": [{"arguments": {}}]}], "messages[0].tool_calls[0]: no call"),
    ([ANSWER | {"tool_calls": [{"function": "add"}]}], "messages[0].tool_calls[0]: no call"),
    ([ANSWER | {"tool_calls": [{"name": "add", "arguments": "a=1"}]}], "tool_calls[0].arguments: not JSON"),
    (
        [ANSWER | {"tool_calls": [{"name": "add", "arguments": [1]}]}],
        "tool_calls[0].arguments: a list; expected an object",
    ),
    ([ANSWER | {"tool_calls": [{"name": "\ud800"}]}], "messages[0].tool_calls: nothing that JSON can hold"),
    ([ANSWER | {"reasoning_content": 3}], "messages[0].reasoning_content: a number"),
    ([USER, ANSWER, {"role": "tool", "content": "2", "tool_call_id": 7}], "messages[2].tool_call_id: a number"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES)
def test_bad_messages_are_told_with_their_place(messages, message):
    assert message in told({"messages": messages})


def test_all_that_is_wrong_with_a_row_is_told():
    assert len(sample_of({"messages": [{"role": "asistant", "content": ""}, {"role": "user", "content": 3}]})) == 3
    assert len(sample_of({"messages": [USER, {"role": "assistant", "weight": -1}]})) == 2


def test_values_of_tables_that_json_lacks_are_told_by_their_type():
    assert told({"text": b"a"}) == "text: a value of type bytes; expected text"


def test_a_row_of_another_kind_than_the_first_is_told_with_what_it_has():
    fields = choose_fields(["prompt", "completion", "tools"], {}, "train.jsonl")
    (problem,) = to_sample({"text": "a", "prompt": "b"}, fields)
    assert str(problem) == ": no 'completion' (it has text, prompt); expected prompt and completion in every row"
    assert to_sample({"prompt": "a", "completion": "b"}, fields) == {"prompt": "a", "completion": "b"}
    fields = choose_fields(["input_ids", "labels"], {}, "train.jsonl")  # learning from all of it is not what was meant
    (problem,) = to_sample({"input_ids": [1]}, fields)
    assert "no 'labels'" in str(problem)


# Which columns count


@pytest.mark.parametrize(
    ("columns", "fields"),
    [
        (["text", "input_ids", "output", "instruction", "conversations", "messages"], ["messages"]),
        (
            ["text", "output", "instruction", "completion", "prompt", "conversations", "tools"],
            ["conversations", "tools"],
        ),
        (["text", "output", "instruction", "completion", "prompt"], ["prompt", "completion"]),
        (["text", "input_ids", "input", "output", "instruction"], ["instruction", "output", "input"]),
        (["text", "input_ids", "attention_mask", "labels"], ["input_ids", "labels"]),
        (["text", "labels", "prompt"], ["text"]),
    ],
)
def test_the_richest_format_is_taken(columns, fields):
    assert chosen(columns) == {field: field for field in fields}


def test_named_columns_choose_the_format():
    columns = ["messages", "text", "question", "answer", "context"]
    assert chosen(columns) == {"messages": "messages"}
    mapped = chosen(columns, {"question": "prompt", "answer": "completion"})
    assert mapped == {"prompt": "question", "completion": "answer"}
    mapping = {"question": "instruction", "answer": "output", "context": "input"}
    assert chosen(columns, mapping) == {ours: theirs for theirs, ours in mapping.items()}
    assert chosen(columns, {"text": "text"}) == {"text": "text"}


def chosen(columns, mapping=None):
    """Of the fields that are chosen, those that the first row has."""
    fields = choose_fields(columns, mapping or {}, "train.jsonl")
    return {ours: theirs for ours, theirs in fields.items() if theirs in columns}


def test_what_only_later_rows_have_counts_too():
    fields = choose_fields(["messages"], {}, "train.jsonl")
    assert to_sample({"messages": [USER, ANSWER]}, fields) == {"messages": [USER, ANSWER]}
    assert to_sample({"messages": [USER, ANSWER], "tools": [{"name": "add"}]}, fields)["tools"] == [{"name": "add"}]
    fields = choose_fields(["instruction", "output"], {}, "train.jsonl")
    (system, user, _) = to_sample({"instruction": "a", "output": "b", "input": "c", "system": "d"}, fields)["messages"]
    assert (system["content"], user["content"]) == ("d", "a\n\nc")
    fields = choose_fields(["input_ids"], {}, "train.jsonl")  # whose labels would be learned from, unnoticed
    (problem,) = to_sample({"input_ids": [1, 2], "labels": [-100, 2]}, fields)
    assert str(problem).startswith("labels: given here, and not in the first row; expected labels in every row")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"question": "promt"}, "'promt' is no field; expected messages, tools, conversations"),
        ({"question": "promt"}, "did you mean 'prompt'?"),
        ({"questions": "prompt"}, "train.jsonl has no column 'questions'; expected one of question, answer, more"),
        ({"questions": "prompt"}, "did you mean 'question'?"),
        ({"question": "prompt", "answer": "prompt"}, "prompt is given twice"),
        (
            {"question": "prompt"},
            "columns question, answer, more; expected messages, or prompt and completion, or text",
        ),
        (
            {"question": "prompt", "answer": "completion", "more": "input"},
            "dataset_columns more=input: input does not go with prompt and completion",
        ),
    ],
)
def test_a_wrong_mapping_is_told(mapping, message):
    with pytest.raises(UserError) as caught:
        choose_fields(["question", "answer", "more"], mapping, "train.jsonl")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "ours"), [(["prompt", "chosen", "rejected"], "completion"), (["chosen", "rejected"], "messages")]
)
def test_preference_pairs_are_told_how_to_be_learned_from(columns, ours):
    with pytest.raises(UserError) as caught:
        choose_fields(columns, {}, "train.jsonl")
    told = f"preference pairs are not trained on here; --dataset_columns chosen={ours} takes the chosen answers"
    assert str(caught.value).endswith(f"    -> {told}")
    assert choose_fields(columns, {"chosen": ours}, "train.jsonl")[ours] == "chosen"


def test_an_evaluation_set_with_our_columns_needs_no_mapping():
    mapping = {"question": "prompt", "answer": "completion"}

    def fields(*columns, may_lack=True):
        return {o: t for o, t in choose_fields(columns, mapping, "eval.jsonl", may_lack).items() if t in columns}

    assert fields("prompt", "completion") == {"prompt": "prompt", "completion": "completion"}
    assert fields("question", "completion") == {"prompt": "question", "completion": "completion"}
    with pytest.raises(UserError, match=r"eval\.jsonl has no column 'answer'"):  # its text is not what was meant
        fields("question", "text")
    with pytest.raises(UserError, match=r"eval\.jsonl has no column 'question'"):  # training data must have them
        fields("prompt", "completion", may_lack=False)


def test_every_field_belongs_to_a_format():
    assert set(FIELDS) == {
        *("messages", "conversations", "tools", "system", "prompt", "completion"),
        *("instruction", "input", "output", "input_ids", "labels", "text"),
    }
