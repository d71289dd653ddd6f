"""Messages as others write them: read as what they mean, or reported with the field that is wrong."""

import json

from data_helpers import ANSWER, SYSTEM, USER, problems_of, sample_of

ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD_TOOL = {"name": "add", "description": "Adds", "parameters": SCHEMA}


def messages_of(*messages):
    return sample_of({"messages": list(messages)})["messages"]


def test_sharegpt_speakers_become_roles():
    said = [
        {"from": "human", "value": "Hi", "train": False, "weight": None},
        {"from": "gpt", "value": "Hello", "train": False, "weight": None},
        {"from": "observation", "value": "2"},
        {"from": "bot", "value": "Hello", "train": None, "weight": 2},
    ]
    result = {"role": "tool", "content": "2"}
    expected = [SYSTEM, USER, ANSWER | {"weight": 0.0}, result, ANSWER | {"weight": 2.0}]
    for row in (
        {"conversations": said, "system": "Be kind"},
        {"conversations": [{"from": "system", "value": "Be kind"}, *said]},
    ):
        assert sample_of(row) == {"messages": expected}


def test_calls_in_any_form_become_objects_in_one_form():
    made = {"role": "assistant", "content": "", "tool_calls": [ADD]}
    call = {"name": "add", "arguments": {"a": 1}}
    for calls in (
        [ADD],
        json.dumps(json.dumps([ADD])),
        [json.dumps(ADD)],
        [call],
        [{"type": None, "function": {"name": "add", "arguments": '{"a": 1}'}, "index": 0}],
    ):
        assert messages_of(USER, {"role": "assistant", "content": None, "tool_calls": calls}) == [USER, made]
    assert messages_of(USER, {"role": "assistant", "content": "", "function_call": call}) == [USER, made]
    for role in ("tool_call", "function_call"):
        said = [USER, {"role": role, "content": json.dumps(call)}, {"role": "tool_response", "content": "2"}, ANSWER]
        assert messages_of(*said) == [USER, made, {"role": "tool", "content": "2"}, ANSWER]
    said = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps([ADD])}]
    assert sample_of({"conversations": said})["messages"] == [USER, made]
    (without,) = messages_of({"role": "assistant", "tool_calls": [{"name": "now", "arguments": "{}"}]})
    assert without["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


def test_calls_keep_their_id_and_answers_refer_to_it():
    call, answer = ADD | {"id": "c1"}, {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    calling = {"role": "assistant", "content": "Let me see", "tool_calls": [call]}
    assert messages_of(USER, calling, answer, ANSWER) == [USER, calling, answer, ANSWER]


def test_reasoning_is_taken_under_any_of_its_names():
    names = {"reasoning_content", "thinking", "reasoning"}
    for name in names:
        for value in (None, "", "Hm"):
            others = dict.fromkeys(names - {name}, value)
            assert messages_of(USER, ANSWER | {name: "Hm"} | others)[1] == ANSWER | {"reasoning_content": "Hm"}
        assert messages_of(USER | {name: ""}, ANSWER) == [USER, ANSWER]


def test_tools_become_those_of_openai_and_what_describes_them_is_not_rewritten():
    openai = json.dumps([{"type": "function", "function": ADD_TOOL}])
    for tool in (
        ADD_TOOL,
        {"type": "function"} | ADD_TOOL,
        {"function": ADD_TOOL},
        {"type": None, "function": ADD_TOOL},
    ):
        for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
            assert json.dumps(sample_of({"messages": [USER, ANSWER], "tools": tools})["tools"]) == openai
    strict = {"function": ADD_TOOL | {"default": None}, "type": "function", "strict": True}
    assert json.dumps(sample_of({"messages": [USER, ANSWER], "tools": [strict]})["tools"]) == json.dumps([strict])
    for tools in (None, "", [], "[]"):
        assert sample_of({"messages": [USER, ANSWER], "tools": tools}) == {"messages": [USER, ANSWER]}


def test_nulls_parts_and_other_names_are_read():
    filled = {"tool_calls": None, "name": None, "weight": None, "train": None, "reasoning_content": None}
    assert messages_of(USER | filled, ANSWER | filled) == [USER, ANSWER]
    parts = [{"type": "text", "text": "H", "image": None}, {"type": "text", "text": "i"}]
    assert messages_of({"role": "user", "content": parts}, ANSWER) == [USER, ANSWER]
    assert messages_of({"role": "developer", "content": "Be kind"}, USER | {"id": 7}, ANSWER) == [SYSTEM, USER, ANSWER]
    for text in ("\u200bHi", "\U0001f44d\ufe0f", "\u0e33", "\ufffd"):  # with a visible character
        assert messages_of(USER, ANSWER | {"content": text})[1]["content"] == text


def test_train_and_weight_of_an_answer_become_one_weight():
    for said, weight in (
        ({"train": False, "weight": 3}, 0.0),
        ({"train": True}, None),
        ({"weight": 0}, 0.0),
        ({"train": True, "weight": 0.25}, 0.25),
    ):
        answer = messages_of(USER, ANSWER | said)[1]
        assert answer == (ANSWER if weight is None else ANSWER | {"weight": weight})


BAD_MESSAGES = [
    ("Hi", "messages: a string that is not JSON"),
    ([USER], "messages: no assistant turn; expected at least one"),
    ([USER, ANSWER | {"content": " \u200b"}], "messages[1].content: only invisible characters (U+200B)"),
    ([{"role": "user", "content": [{"type": "video", "url": "x"}]}, ANSWER], "content[0]: a part of type 'video'"),
    ([{"role": "user", "content": "\ud800"}, ANSWER], "messages[0].content: half of a surrogate pair"),
    (
        [USER, SYSTEM, ANSWER],
        "messages[1].role: a second system message, or one after other messages; expected one, first",
    ),
    (
        [ANSWER | {"tool_calls": [ADD["function"] | {"result": 4}]}],
        "tool_calls[0].result: a key of a call that nothing",
    ),
    (
        [ANSWER | {"tool_calls": [{"name": "add", "arguments": '{"a": 1, "a": 2}'}]}],
        "messages[0].tool_calls[0].arguments: an object has the key 'a' twice, with different values",
    ),
    ([ANSWER | {"reasoning": "a", "thinking": "b"}], "messages[0].reasoning: differs from thinking"),
    ([ANSWER | {"tool_calls": [ADD], "function_call": ADD}], "messages[0]: calls in messages[0].tool_calls and"),
]


def test_bad_messages_are_reported_with_their_field():
    for messages, message in BAD_MESSAGES:
        assert message in problems_of({"messages": messages})
    for tools, message in (
        ({"name": "add"}, "tools: an object; expected a list of tools"),
        (['{"name": "add", "name": "sub"}'], "tools[0]: an object has the key 'name' twice"),
    ):
        assert message in problems_of({"messages": [USER, ANSWER], "tools": tools})
