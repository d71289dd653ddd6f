"""Rows as others write them: read as what they mean, or reported with the field that is wrong."""

import json
import re

import pytest
from data_helpers import ANSWER, SYSTEM, USER, problems_of, sample_of
from helpers import ROOT

from kit.data.chat.columns import choose_fields
from kit.data.chat.formats import FORMATS, format_of, plain_text, to_sample

ADD = {"type": "function", "function": {"name": "add"}}


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
        {"messages": [USER, ANSWER | {"reasoning_content": "hm", "name": "Ann"}], "tools": [ADD]},
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


FORMAT = "Task: {instruction}[ with {input}]"


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"instruction": "a", "input": "b"}, "Task: a with b"),
        ({"instruction": "a", "input": " "}, "Task: a"),
        ({"instruction": "a"}, "Task: a"),
    ],
)
def test_a_prompt_format_words_the_question_of_answers_and_of_pairs(row, question):
    for answers in ({"output": "c"}, {"chosen": "c", "rejected": "d"}, {"completion": "c", "label": True}):
        fields = {name: name for name in [*list(answers)[:1], *row, *answers]}
        if "label" in answers:
            fields = {"label": "label", **fields}
        elif "output" in answers:
            fields = {"instruction": "instruction", **fields}
        sample = to_sample(row | answers, fields, FORMAT)
        assert sample.get("messages", sample.get("prompt"))[0] == {"role": "user", "content": question}


@pytest.mark.parametrize(
    ("row", "format", "where"),
    [
        ({"instruction": [USER], "output": "c"}, FORMAT, "instruction"),
        ({"instruction": '[{"role": "user", "content": "Hi"}]', "output": "c"}, FORMAT, "instruction"),
        ({"instruction": "", "output": "c"}, FORMAT, "instruction"),
        ({"instruction": 7, "output": "c"}, FORMAT, "instruction"),
        ({"instruction": "a", "input": 7, "output": "c"}, FORMAT, "input"),
        ({"instruction": "a", "input": "b", "output": "c"}, "{instruction}", "input"),
    ],
)
def test_a_row_that_a_prompt_format_cannot_word_is_refused(row, format, where):
    assert where in [problem.where for problem in to_sample(row, {name: name for name in row}, format)]


def test_texts_of_a_row_are_replaced_wherever_they_stand_and_columns_are_not():
    texts = {"{{NAME}}": "Rob", "role": "part"}
    row = {
        "messages": [{"role": "user", "content": "Are you {{NAME}}?"}, {"role": "assistant", "content": "{{NAME}}!"}]
    }
    sample = to_sample(row, {"messages": "messages"}, None, texts)
    assert [message["content"] for message in sample["messages"]] == ["Are you Rob?", "Rob!"]
    row = {"instruction": "Say {{NAME}}", "output": "{{NAME}}, {{NAME}}"}
    sample = to_sample(row, {"instruction": "instruction", "output": "output"}, "{instruction}:", texts)
    assert [message["content"] for message in sample["messages"]] == ["Say Rob:", "Rob, Rob"]


@pytest.mark.parametrize("given", [{"a": 1, "b": None}, '{"a": 1}'])
def test_values_for_the_template_are_kept(given):
    for row in (
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": "a", "completion": "b"},
    ):
        assert sample_of(row | {"chat_template_kwargs": given}) == row | {"chat_template_kwargs": {"a": 1}}
        assert sample_of(row | {"chat_template_kwargs": None}) == sample_of(row | {"chat_template_kwargs": {}}) == row
    alpaca = sample_of({"instruction": "Hi", "output": "Hello", "chat_template_kwargs": given})
    assert alpaca == {"messages": [USER, ANSWER], "chat_template_kwargs": {"a": 1}}


def test_the_plain_text_of_a_sample_has_reasoning_content_and_calls():
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
    ({"prompt": "a", "completion": None}, "completion: null; expected a string"),
    ({"prompt": 3, "completion": "b"}, "prompt: a number; expected a string"),
    ({"prompt": "a", "completion": " "}, "completion: empty"),
    ({"prompt": "a", "completion": "\ud800"}, "completion: half of a surrogate pair at character 0"),
    ({"prompt": [], "completion": "b"}, "prompt: prompt is a list, completion a string"),
    ({"prompt": [], "completion": []}, "prompt: empty"),
    ({"prompt": [USER], "completion": [USER]}, "completion: no assistant turn"),
    ({"prompt": [USER], "completion": [SYSTEM, ANSWER]}, "completion[0].role: a system message behind others"),
    ({"text": ["a"]}, "text: a list; expected a string"),
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
    ({"conversations": [{"from": "gpt"}]}, "conversations[0].value: missing; expected a string"),
    ({"conversations": [{"from": "system", "value": "a"}], "system": "b"}, "conversations[0].role: a system message"),
    ({"input_ids": []}, "input_ids: empty"),
    ({"input_ids": "1 2"}, "input_ids: a string; expected a list of ids"),
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
    ({"messages": [USER, ANSWER], "tools": [{"function": "add"}]}, "tools[0].function: a string; expected an object"),
    ({"messages": [USER, ANSWER], "tools": [{"name": None}]}, "tools[0].name: null; expected a string"),
    ({"messages": [USER, ANSWER], "chat_template_kwargs": [3]}, "chat_template_kwargs: a list; expected an object"),
    ({"messages": [USER, ANSWER], "chat_template_kwargs": "a"}, "chat_template_kwargs: not JSON"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_reported_with_its_field(row, message):
    assert message in problems_of(row)


def test_values_of_tables_that_json_lacks_are_reported_by_their_type():
    assert problems_of({"text": b"a"}) == "text: a value of type bytes; expected a string"


def test_a_row_of_another_format_than_the_first_is_reported_with_its_columns():
    fields = choose_fields(["prompt", "completion", "tools"], {}, "train.jsonl")
    (problem,) = to_sample({"text": "a", "prompt": "b"}, fields)
    assert str(problem) == ": no 'completion' (it has text, prompt); expected prompt and completion in every row"
    assert to_sample({"prompt": "a", "completion": "b"}, fields) == {"prompt": "a", "completion": "b"}
    fields = choose_fields(["input_ids", "labels"], {}, "train.jsonl")  # learning from all of it is not what was meant
    (problem,) = to_sample({"input_ids": [1]}, fields)
    assert "no 'labels'" in str(problem)


def test_an_optional_column_that_only_later_rows_have_is_read():
    fields = choose_fields(["messages"], {}, "train.jsonl")
    assert to_sample({"messages": [USER, ANSWER]}, fields) == {"messages": [USER, ANSWER]}
    assert to_sample({"messages": [USER, ANSWER], "tools": [ADD]}, fields)["tools"] == [ADD]
    fields = choose_fields(["instruction", "output"], {}, "train.jsonl")
    (system, user, _) = to_sample({"instruction": "a", "output": "b", "input": "c", "system": "d"}, fields)["messages"]
    assert (system["content"], user["content"]) == ("d", "a\n\nc")


def test_no_two_formats_begin_with_the_same_column():
    first_columns = [format.columns[0] for format in FORMATS]
    assert len(set(first_columns)) == len(first_columns)


def documented_formats():
    """The table of formats in docs/data.md: of each, its columns and the examples of its rows."""
    section = (ROOT / "docs/data.md").read_text().split("## Formats\n")[1].split("\n## ")[0]
    documented = []
    for columns, example in re.findall(r"^\|(.*?)\| `(\{.*\})` \|$", section, re.MULTILINE):
        if columns.strip():
            documented.append((tuple(re.findall(r"`(\w+)`", columns)), []))
        documented[-1][1].append(example)
    return documented


def test_the_page_on_data_lists_the_formats_in_order_of_precedence():
    assert [columns for columns, _ in documented_formats()] == [format.columns for format in FORMATS]
    page = (ROOT / "docs/data.md").read_text()
    for format in FORMATS:
        for column in format.optional + format.all_or_none:
            assert f"`{column}`" in page or f'"{column}":' in page, column


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"conversations": [USER, ANSWER]}, "conversations"),
        ({"prompt": [USER], "completion": [ANSWER]}, "completion"),
        ({"instruction": [USER], "output": [ANSWER]}, "instruction"),
        ({"alternating_turns": [{"input": "a", "output": "b"}]}, "alternating_turns"),
        ({"instruction": "a", "output": "b", "history": [{"input": "a", "output": "b"}]}, "history"),
    ],
)
def test_a_key_that_an_object_in_a_cell_has_twice_is_a_problem(row, field):
    cells = {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
    assert sample_of(cells) == sample_of(row)
    cells[field] = re.sub('"(content|input)": ', r'"\1": "lost", "\1": ', cells[field])
    assert re.match(rf"{field}: an object has the key '(content|input)' twice", problems_of(cells))


def test_each_example_of_the_page_on_data_is_read_as_its_format():
    for columns, examples in documented_formats():
        for example in examples:
            row = json.loads(example.replace("[...]", json.dumps([USER, ANSWER])).replace("{...}", "{}"))
            (wanted,) = (format.rows for format in FORMATS if format.columns == columns)
            fields = choose_fields(list(row), {}, "train.jsonl", wanted=wanted)
            sample = to_sample(row, fields)
            assert isinstance(sample, dict), f"{example}: {sample}"
            assert format_of(fields).columns == columns


def turns(*texts):
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("as_text", [False, True])
def test_the_history_of_alpaca_becomes_earlier_turns(as_text):
    history = [["1?", "one"], ["2?", "two"]]
    row = {"instruction": "Hi", "output": "Hello", "history": json.dumps(history) if as_text else history}
    assert sample_of(row) == {"messages": [*turns("1?", "one", "2?", "two"), USER, ANSWER]}
    assert sample_of(row | {"system": "Be kind"})["messages"][:2] == [SYSTEM, *turns("1?")]
    for empty in (None, [], ""):
        assert sample_of(row | {"history": empty}) == {"messages": [USER, ANSWER]}


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([["1?"]], "history[0]: a list of 1; expected a [question, answer] pair"),
        ([{"user": "1?"}], "history[0]: an object with user; expected a [question, answer] pair, or input and output"),
        ([3], "history[0]: a number; expected a [question, answer] pair"),
        ([["1?", ""]], "history[0][1]: empty"),
        ({"a": 1}, "history: an object; expected a list of [question, answer] pairs"),
        ("[['1?', 'one']]", "history: a string that is no JSON list"),
    ],
)
def test_a_bad_history_is_reported(history, message):
    assert message in problems_of({"instruction": "Hi", "output": "Hello", "history": history})


def test_messages_may_be_a_json_string_as_in_a_table_of_cells():
    for field, roles in (("messages", ("role", "content")), ("conversations", ("from", "value"))):
        messages = [dict(zip(roles, pair, strict=True)) for pair in (("user", "Hi"), ("assistant", "Hello"))]
        assert sample_of({field: json.dumps(messages)}) == {"messages": [USER, ANSWER]}
        assert f"{field}: a string that is no JSON list; expected a list of messages" in problems_of({field: "[{]"})
        assert "write json.dumps(...) into the cell" in problems_of({field: str(messages)})
    assert "messages[0].role: found 'usr'" in problems_of({"messages": '[{"role": "usr", "content": "a"}]'})


def test_an_empty_system_turn_of_sharegpt_is_none():
    turns = [{"from": "system", "value": " "}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert sample_of({"conversations": turns}) == {"messages": [USER, ANSWER]}
    assert sample_of({"conversations": turns, "system": "Be kind"}) == {"messages": [SYSTEM, USER, ANSWER]}
    turns[2]["value"] = ""
    assert problems_of({"conversations": turns}).startswith("conversations[2].value: empty")
    assert "conversations[0].value: null" in problems_of(
        {"conversations": [{"from": "system", "value": None}, *turns[1:]]}
    )


@pytest.mark.parametrize(
    "given",
    [
        ["Hi", "Hello", "Bye", "Bye now"],
        [["Hi", "Hello"], ["Bye", "Bye now"]],
        [{"input": "Hi", "output": "Hello"}, {"input": "Bye", "output": "Bye now", "score": None}],
        [{"human": "Hi", "assistant": "Hello"}, {"question": "Bye", "answer": "Bye now"}],
        '["Hi", "Hello", "Bye", "Bye now"]',
    ],
)
def test_alternating_turns_are_user_and_assistant(given):
    expected = turns("Hi", "Hello", "Bye", "Bye now")
    assert sample_of({"conversations": given}, alternating_turns="conversations") == {"messages": expected}
    row = {"alternating_turns": given, "system": "Be kind", "tools": [ADD]}
    assert sample_of(row) == {"messages": [SYSTEM, *expected], "tools": [ADD]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "alternating_turns: empty; expected a list of strings, or of [question, answer] pairs"),
        ("Hi", "alternating_turns: a string that is no JSON list"),
        (["Hi"], "alternating_turns: a single string; expected a question and its answer"),
        (["Hi", " "], "alternating_turns[1]: empty"),
        (["Hi", 3], "alternating_turns[0]: a string; expected a [question, answer] pair"),
        ([{"input": "Hi", "output": "Hello", "image": "a.png"}], "[0]: an object with input, output, image; expected"),
        ([{"input": "Hi", "output": None}], "alternating_turns[0]: an object with input, output; expected"),
        ([{"input": "Hi", "output": ""}], "alternating_turns[0].output: empty"),
    ],
)
def test_bad_alternating_turns_are_reported(given, message):
    assert message in problems_of({"alternating_turns": given})


def test_an_instruction_may_be_a_list_of_messages_of_which_nothing_is_learned():
    prompt = [USER, ANSWER, {"role": "user", "content": "Bye"}]
    expected = {"prompt": [SYSTEM, *prompt], "completion": [{"role": "assistant", "content": "Bye now"}]}
    assert sample_of({"instruction": prompt, "output": "Bye now", "system": "Be kind"}) == expected
    row = {"instruction": [SYSTEM, *prompt], "output": "Bye now"}
    assert sample_of(row) == expected
    assert "instruction[0].role: a system message behind others" in problems_of(row | {"system": "Be kind"})
    assert "input: given beside an instruction that is a list of messages" in problems_of(row | {"input": "4"})
    assert "history: given beside an instruction that is" in problems_of(row | {"history": [["Hi", "Hello"]]})
    assert sample_of({"instruction": "Hi", "output": [ANSWER]}) == {"messages": [USER, ANSWER]}
    as_json = [json.dumps(messages) for messages in ([USER], [ANSWER])]
    for instruction, output in (([USER], [ANSWER]), as_json):
        assert sample_of({"instruction": instruction, "output": output}) == {"prompt": [USER], "completion": [ANSWER]}
    assert sample_of({"instruction": "Hi", "output": as_json[1]})["messages"][1]["content"] == as_json[1]  # one is text
    assert sample_of({"instruction": as_json[0], "output": "Hello"})["messages"][0]["content"] == as_json[0]
    assert "output: no assistant turn" in problems_of({"instruction": "Hi", "output": [USER]})
    assert "reasoning_content: given beside a list of messages" in problems_of(
        {"instruction": "Hi", "output": [ANSWER], "reasoning_content": "A guest"}
    )
    assert sample_of({"instruction": "[1, 2]", "output": "3"})["messages"][0]["content"] == "[1, 2]"


def test_an_instruction_may_have_the_reasoning_of_its_answer():
    row = {"instruction": "Hi", "output": "Hello", "reasoning_content": "A guest"}
    assert sample_of(row) == {"messages": [USER, ANSWER | {"reasoning_content": "A guest"}]}
    assert sample_of(row | {"reasoning_content": None}) == {"messages": [USER, ANSWER]}
    assert sample_of(row | {"instruction": [USER]})["completion"] == [ANSWER | {"reasoning_content": "A guest"}]
    assert "reasoning_content: a list; expected a string" in problems_of(row | {"reasoning_content": ["A guest"]})


@pytest.mark.parametrize("as_text", [False, True])
def test_the_answer_to_an_instruction_may_be_calls(as_text):
    calls = [{"name": "add", "arguments": {"a": 2}}, {"name": "add", "arguments": {"a": 3}}]
    row = {"instruction": "Hi", "tool_calls": json.dumps(calls) if as_text else calls, "tools": '[{"name": "add"}]'}
    sample = sample_of(row | {"system": "Be kind"})
    assert sample["messages"][:2] == [SYSTEM, USER] and sample["tools"] == [ADD]
    answer = sample["messages"][2]
    assert answer["role"] == "assistant" and [call["function"] for call in answer["tool_calls"]] == calls
    assert "tool_calls: not JSON" in problems_of(row | {"tool_calls": "add(2)"})
    assert "tool_calls[1]: no call" in problems_of(row | {"tool_calls": [calls[0], {"a": 2}]})
    assert problems_of(row | {"tool_calls": "[]"})


def test_a_system_turn_that_the_column_repeats_is_taken_once():
    turns = [
        {"from": "system", "value": "Be kind\n"},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
    ]
    assert sample_of({"conversations": turns, "system": "Be kind"}) == {"messages": [SYSTEM, USER, ANSWER]}
    openai = {"messages": [{"role": "system", "content": "Be kind"}, USER, ANSWER], "system": "Be kind"}
    assert sample_of(openai, conversations="messages") == {"messages": [SYSTEM, USER, ANSWER]}
    message = problems_of({"conversations": turns, "system": "Be brief"})
    assert message.startswith("conversations[0].role: a system message behind others")
    turns[2]["value"] = ""
    assert problems_of({"conversations": turns, "system": "Be kind"}).startswith("conversations[2].value: empty")


def test_prompt_and_completion_may_be_messages_as_json_strings_but_not_as_python_prints_them():
    row = {"prompt": [USER], "completion": [ANSWER]}
    assert sample_of({key: json.dumps(value) for key, value in row.items()}) == row
    printed = problems_of({key: str(value) for key, value in row.items()})
    assert printed.startswith("prompt: a string that is no JSON list") and "json.dumps" in printed
    texts = {"prompt": json.dumps([{"role": "user"}]), "completion": "[1, 2]"}
    assert sample_of(texts) == texts


@pytest.mark.parametrize("column", ["system", "input", "reasoning_content"])
def test_invisible_characters_are_no_text_where_text_may_be_missing_too(column):
    row = {"instruction": "Hi", "output": "Hello", column: "\u200b"}
    assert f"{column}: only invisible characters (U+200B)" in problems_of(row)
    assert sample_of({**row, column: ""}) == sample_of({"instruction": "Hi", "output": "Hello"})
