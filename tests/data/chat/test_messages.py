"""Messages as others write them: read as what they mean, or reported with the field that is wrong."""

import json
import math

import pytest
from data_helpers import ANSWER, SYSTEM, USER, problems_of, sample_of

ARGUMENTS = ["arguments", "parameters", "args", "input"]  # of OpenAI, Llama, LangChain, Anthropic
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def messages_of(*messages):
    return sample_of({"messages": list(messages)})["messages"]


# What is read


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


@pytest.mark.parametrize("role", ["tool_call", "function_call"])
def test_a_turn_of_its_own_role_that_holds_a_call_is_a_call_of_the_assistant(role):
    call = {"role": role, "content": json.dumps({"name": "add", "arguments": {"a": 1}})}
    row = {"messages": [USER, call, {"role": "tool_response", "content": "2"}, ANSWER]}
    calling = {"role": "assistant", "content": "", "tool_calls": [ADD]}
    assert sample_of(row)["messages"] == [USER, calling, {"role": "tool", "content": "2"}, ANSWER]
    row["messages"][1] = {"role": role, "content": "add 1"}
    assert [problem.where for problem in sample_of(row)] == ["messages[1].content"]


@pytest.mark.parametrize("value", [json.dumps({"name": "add", "arguments": {"a": 1}}), [ADD], json.dumps([ADD])])
def test_sharegpt_function_calls_become_tool_calls(value):
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": value}]}
    assert sample_of(row)["messages"] == [USER, {"role": "assistant", "content": "", "tool_calls": [ADD]}]


@pytest.mark.parametrize(
    "calls",
    [
        [ADD],
        json.dumps([ADD]),
        [json.dumps(ADD)],
        [{"name": "add", "arguments": {"a": 1}}],
        [{"name": "add", "arguments": '{"a": 1}'}],
        [{"type": None, "function": {"name": "add", "arguments": '{"a": 1}'}}],
        [{"name": "add", "arguments": json.dumps('{"a": 1}')}],
        json.dumps(json.dumps([ADD])),
    ],
)
def test_tool_calls_become_objects_in_one_form(calls):
    assert messages_of(USER, {"role": "assistant", "content": None, "tool_calls": calls}) == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [ADD]},
    ]


@pytest.mark.parametrize("content", ["", None, "Let me see"])
def test_a_call_under_its_older_name_becomes_a_tool_call(content):
    calling = {"role": "assistant", "content": content, "function_call": ADD["function"] | {"arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "add", "content": "2"}
    assert messages_of(USER, calling | {"tool_calls": None}, result, ANSWER) == [
        USER,
        {"role": "assistant", "content": content or "", "tool_calls": [ADD]},
        {"role": "tool", "content": "2", "name": "add"},
        ANSWER,
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_taken_under_any_of_its_names(name):
    others = dict.fromkeys({"reasoning_content", "thinking", "reasoning"} - {name})
    for more in (others, dict.fromkeys(others, ""), dict.fromkeys(others, "Hm"), {}):
        assert messages_of(USER | others, ANSWER | {name: "Hm"} | more)[1] == ANSWER | {"reasoning_content": "Hm"}
    assert messages_of(USER | {name: ""}, ANSWER) == [USER, ANSWER]


def test_calls_keep_their_id_and_answers_refer_to_it():
    call, answer = ADD | {"id": "c1"}, {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    calling = {"role": "assistant", "content": "Let me see", "tool_calls": [call]}
    assert messages_of(USER, calling, answer, ANSWER) == [USER, calling, answer, ANSWER]


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("others", [None, "", {}, "{}"])
def test_the_arguments_of_a_call_are_read_under_any_of_their_names(name, others):
    function = {"name": "add"} | dict.fromkeys(ARGUMENTS, others)
    for arguments in ({"a": 1}, '{"a": 1}'):
        for call in (
            {"name": "add", name: arguments},
            function | {name: arguments},
            {"type": "function", "function": function | {name: arguments}},
            {"type": "tool_call", "index": 0, "name": "add", name: arguments},
        ):
            said = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps(call)}]
            made = [*sample_of({"conversations": said})["messages"]]
            for holder in ({"tool_calls": [call]}, {"function_call": call}):
                made += messages_of(USER, {"role": "assistant", "content": ""} | holder)
            assert made == [USER, {"role": "assistant", "content": "", "tool_calls": [ADD]}] * 3


@pytest.mark.parametrize("name", ARGUMENTS[1:])
def test_arguments_under_two_names_must_be_the_same(name):
    call = {"name": "add", "arguments": {"a": 1}, name: '{"a": 1}'}
    assert messages_of({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"] == [ADD]
    calling = {"role": "assistant", "tool_calls": [call | {name: {"a": 2}}]}
    assert f"tool_calls[0].{name}: differs from arguments; expected one of them" in problems_of({"messages": [calling]})


@pytest.mark.parametrize("name", ["id", "call_id", "tool_call_id"])
def test_the_id_of_a_call_is_read_under_any_of_its_names(name):
    calls = [{"name": "add", "arguments": {"a": 1}, "id": None, name: "c1"}]
    assert messages_of({"role": "assistant", "tool_calls": calls})[0]["tool_calls"] == [ADD | {"id": "c1"}]
    calls[0] |= {"id": "fc_1", "call_id": "c1"}  # of OpenAI's Responses API, where a result has the second
    assert messages_of({"role": "assistant", "tool_calls": calls})[0]["tool_calls"][0]["id"] == "c1"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD_TOOL = {"name": "add", "description": "Adds", "parameters": SCHEMA}


@pytest.mark.parametrize(
    "tool",
    [
        ADD_TOOL,
        {"type": "function"} | ADD_TOOL,
        {"function": ADD_TOOL},
        {"type": None, "function": ADD_TOOL},
        {"name": "add", "description": "Adds", "input_schema": SCHEMA},
        {"type": "custom", "name": "add", "description": "Adds", "input_schema": SCHEMA},
        {"name": "add", "description": "Adds", "inputSchema": SCHEMA},
    ],
)
def test_a_tool_in_any_form_is_the_same_text_as_in_openais(tool):
    openai = json.dumps([{"type": "function", "function": ADD_TOOL}])
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        assert json.dumps(sample_of({"messages": [USER, ANSWER], "tools": tools})["tools"]) == openai  # in this order


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": ADD_TOOL, "strict": True},
        {"function": ADD_TOOL, "type": "function"},
        {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int", "description": "One"}}}},
        {"name": "add", "description": "Adds", "parameter_definitions": {"a": {"type": "int"}}},  # Cohere's
    ],
)
def test_what_describes_a_tool_is_not_rewritten(tool):
    assert json.dumps(sample_of({"messages": [USER, ANSWER], "tools": [tool]})["tools"]) == json.dumps([tool])


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"description": "Adds"}, "tools[0].name: missing; expected a string, in an object such as"),
        ({"type": "function", "function": {"name": ""}}, "tools[0].name: empty; expected a string"),
        ({"type": "web_search_20250305", "name": "web_search"}, "tools[0].type: a tool of type 'web_search_20250305'"),
        (ADD_TOOL | {"input_schema": {"type": "object"}}, "tools[0].input_schema: differs from parameters"),
        ('{"name": "add", "name": "sub"}', "tools[0]: an object has the key 'name' twice"),
    ],
)
def test_what_is_no_tool_is_reported(tool, message):
    assert message in problems_of({"messages": [USER, ANSWER], "tools": [tool]})


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_a_call_without_arguments_has_none(arguments):
    calls = [{"name": "now", "arguments": arguments}]
    made = messages_of({"role": "assistant", "tool_calls": calls})
    assert made[0]["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


@pytest.mark.parametrize("tools", ['[{"name": "add", "default": null}]', ['{"name": "add", "default": null}']])
def test_tools_as_json_strings_are_parsed_and_keep_their_nulls(tools):
    row = {"messages": [USER, ANSWER], "tools": tools}
    assert sample_of(row)["tools"] == [{"type": "function", "function": {"name": "add", "default": None}}]


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_an_empty_list_of_tools_is_left_out(tools):
    assert sample_of({"messages": [USER, ANSWER], "tools": tools}) == {"messages": [USER, ANSWER]}


def test_keys_of_a_message_that_are_null_are_as_if_absent_and_nulls_further_down_are_meant():
    filled = {"tool_calls": None, "name": None, "weight": None, "train": None, "reasoning_content": None}
    assert messages_of(USER | filled, ANSWER | filled) == [USER, ANSWER]
    tools = [ADD | {"function": {"name": "add", "parameters": {"a": {"type": "int"}, "b": None}}}]
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
def test_train_and_weight_of_an_answer_become_one_weight(said, weight):
    answer = messages_of(USER, ANSWER | said)[1]
    assert answer == (ANSWER if weight is None else ANSWER | {"weight": weight})
    assert type(answer.get("weight", 1.0)) is float


@pytest.mark.parametrize("text", ["\u200bHi", "H\u00ad", "\U0001f44d\ufe0f", "\u0e33", "\ufffd", "\u1160\u1161"])
def test_text_with_a_visible_character_is_text(text):
    assert messages_of(USER, ANSWER | {"content": text})[1]["content"] == text


def test_developer_becomes_system_and_unknown_keys_are_left_out():
    assert messages_of({"role": "developer", "content": "Be kind"}, USER | {"id": 7}, ANSWER) == [SYSTEM, USER, ANSWER]


# What is refused


BAD_MESSAGES = [
    ("Hi", "messages: a string that is no JSON list; expected a list of messages"),
    (None, "messages: null; expected a list of messages"),
    ([], "messages: empty"),
    (["Hi"], "messages[0]: a string; expected an object with role and content"),
    ([USER], "messages: no assistant turn; expected at least one"),
    ([{"role": "asistant", "content": "Hi"}], "messages[0].role: found 'asistant'; expected system, user, assistant"),
    ([{"role": "asistant", "content": "Hi"}], "did you mean 'assistant'?"),
    ([{"role": ["user"], "content": "Hi"}], "messages[0].role: a list; expected system, user"),
    ([{"role": "gpt", "content": "Hi"}], "messages[0].role: found 'gpt'"),  # ShareGPT's belong to conversations
    ([{"content": "Hi"}], "messages[0].role: missing"),
    ([{"role": None, "content": "Hi"}], "messages[0].role: null; expected system, user"),
    ([{"from": "user", "value": "Hi"}], "messages[0].role: missing"),
    ([{"role": "assistant"}], "messages[0].content: missing"),
    ([{"role": "assistant", "content": None}], "messages[0].content: null; expected a string"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content: null"),
    ([{"role": "assistant", "content": None, "tool_calls": "[]"}], "messages[0].content: null"),
    ([{"role": "assistant", "content": None, "reasoning_content": "hm"}], "messages[0].content: null"),
    ([USER, {"role": "assistant", "content": " "}], "messages[1].content: empty"),
    ([{"role": "user", "content": ""}, ANSWER], "messages[0].content: empty"),
    *[
        ([USER, ANSWER | {"content": text}], f"messages[1].content: only invisible characters (U+{ord(text[-1]):04X})")
        for text in (*"\u200b\ufeff\u2060\u00ad\u3164\u2800\U000e0020\x00", " \u200b")
    ],
    ([{"role": "tool", "content": {"sum": 2}}, ANSWER], "messages[0].content: an object; expected a string"),
    ([{"role": "tool"}, ANSWER], "messages[0].content: missing"),
    ([{"role": "user", "content": ["Hi"]}, ANSWER], "messages[0].content[0]: not a part with text"),
    ([{"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER], "content[0]: a part of type 'image'"),
    ([{"role": "user", "content": "\ud800"}, ANSWER], "messages[0].content: half of a surrogate pair"),
    ([SYSTEM, SYSTEM, USER, ANSWER], "messages[1].role: a second system message; expected one, first"),
    ([USER, SYSTEM, ANSWER], "messages[1].role: a system message behind others; expected one, first"),
    ([USER, ANSWER | {"train": "yes"}], "messages[1].train: a string; expected true or false"),
    ([USER, ANSWER | {"train": 1}], "messages[1].train: a number; expected true or false"),
    ([USER | {"train": True}, ANSWER], "messages[0].train: true on a turn of the user; expected it on assistant turns"),
    ([USER | {"train": True}, ANSWER], "it on assistant turns: only these are learned from"),
    ([USER | {"weight": 1}, ANSWER], "messages[0].weight: 1 on a turn of the user"),
    ([USER, ANSWER | {"weight": "2"}], "messages[1].weight: a string; expected 0, or a number from 1e-30 to 1e30"),
    ([USER, ANSWER | {"weight": True}], "messages[1].weight: true; expected 0, or a number from 1e-30 to 1e30"),
    ([USER, ANSWER | {"weight": -0.5}], "messages[1].weight: -0.5; expected 0, or a number from 1e-30 to 1e30"),
    ([USER, ANSWER | {"weight": math.nan}], "messages[1].weight: nan; expected 0, or a number from 1e-30 to 1e30"),
    ([USER, ANSWER | {"weight": math.inf}], "messages[1].weight: inf"),
    ([USER, ANSWER | {"weight": 10**400}], "messages[1].weight: 1000"),
    ([USER | {"tool_calls": [ADD]}, ANSWER], "messages[0].tool_calls: calls of the user"),
    ([ANSWER | {"tool_calls": "add(1)"}], "messages[0].tool_calls: not JSON"),
    ([ANSWER | {"tool_calls": 3}], "messages[0].tool_calls: a number; expected a list of calls"),
    ([ANSWER | {"tool_calls": [3]}], "messages[0].tool_calls[0]: no call"),
    ([ANSWER | {"tool_calls": [{"arguments": {}}]}], "messages[0].tool_calls[0]: no call"),
    (
        [ANSWER | {"tool_calls": [{"name": "add", "arguments": '{"a": 1, "a": 2}'}]}],
        "messages[0].tool_calls[0].arguments: an object has the key 'a' twice, with different values",
    ),
    ([ANSWER | {"tool_calls": [{"function": "add"}]}], "messages[0].tool_calls[0]: no call"),
    ([ANSWER | {"tool_calls": [{"name": "add", "arguments": "a=1"}]}], "tool_calls[0].arguments: not JSON"),
    (
        [ANSWER | {"tool_calls": [{"name": "add", "arguments": [1]}]}],
        "tool_calls[0].arguments: a list; expected an object",
    ),
    ([ANSWER | {"tool_calls": [{"name": "\ud800"}]}], "messages[0].tool_calls: nothing that JSON can hold"),
    ([ANSWER | {"reasoning_content": 3}], "messages[0].reasoning_content: a number"),
    ([ANSWER | {"thinking": ["a"]}], "messages[0].thinking: a list; expected a string"),
    (
        [ANSWER | {"reasoning": "a", "thinking": "b"}],
        "messages[0].reasoning: differs from thinking; expected one of them",
    ),
    ([USER | {"thinking": "a"}, ANSWER], "messages[0].thinking: reasoning of the user; expected it on assistant turns"),
    ([ANSWER | {"tool_calls": [ADD], "function_call": ADD}], "function_call: given beside tool_calls; expected one"),
    ([USER | {"function_call": ADD}, ANSWER], "messages[0].function_call: calls of the user"),
    ([ANSWER | {"function_call": "add"}], "messages[0].function_call: not JSON"),
    ([USER, ANSWER, {"role": "tool", "content": "2", "tool_call_id": 7}], "messages[2].tool_call_id: a number"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES)
def test_bad_messages_are_reported_with_their_field(messages, message):
    assert message in problems_of({"messages": messages})


def test_all_problems_of_a_row_are_reported():
    assert len(sample_of({"messages": [{"role": "asistant", "content": ""}, {"role": "user", "content": 3}]})) == 3
    assert len(sample_of({"messages": [USER, {"role": "assistant", "weight": -1}]})) == 2
