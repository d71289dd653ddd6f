"""Rows as others write them: read as what they mean, or told what is wrong and where."""

import pytest
from data_helpers import ANSWER, SYSTEM, USER, sample_of, told

from kit.data.chat.formats import FIELDS, choose_fields, plain_text, to_sample
from kit.errors import UserError

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
    ({"messages": [USER, ANSWER], "chat_template_kwargs": [3]}, "chat_template_kwargs: a list; expected an object"),
    ({"messages": [USER, ANSWER], "chat_template_kwargs": "a"}, "chat_template_kwargs: not JSON"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_told_with_its_field(row, message):
    assert message in told(row)


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
        ({"question": "promt"}, "'promt' is no field; expected messages, tools, chat_template_kwargs, conversations"),
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
        *("instruction", "input", "output", "input_ids", "labels", "text", "chat_template_kwargs"),
    }
