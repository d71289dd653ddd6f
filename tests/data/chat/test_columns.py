"""Which columns of a data set are read: by the kit's names, or by a mapping; messages quote well-known names."""

import json
import shlex

import pytest

from kit.data.chat.columns import choose_fields, columns_flag
from kit.errors import UserError


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
def test_the_first_format_whose_columns_are_there_is_taken(columns, fields):
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


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"question": "promt"}, "'promt' is no field; expected messages, tools, chat_template_kwargs, conversations"),
        ({"question": "promt"}, "did you mean 'prompt'"),
        ({"prompt": "question"}, "expected column=field\n    -> write question=prompt"),
        ({"anwser": "complettion"}, "did you mean 'completion'"),
        ({"anwser": "complettion"}, "did you mean 'answer'"),
        ({"questions": "prompt"}, "train.jsonl has no column 'questions'; expected one of question, answer, more"),
        ({"questions": "prompt"}, "did you mean 'question'"),
        ({"question": "prompt", "answer": "prompt"}, "prompt is given twice"),
        (
            {"question": "prompt"},
            "columns question, answer, more; expected messages, or conversations, or prompt and completion, or",
        ),
        (
            {"question": "prompt", "answer": "completion", "more": "input"},
            "dataset_columns more=input: input does not go with prompt and completion",
        ),
    ],
)
def test_a_wrong_mapping_is_reported(mapping, message):
    with pytest.raises(UserError) as caught:
        choose_fields(["question", "answer", "more"], mapping, "train.jsonl")
    assert message in str(caught.value)


def refusal(columns, mapping=None, wanted="answers"):
    with pytest.raises(UserError) as caught:
        choose_fields(columns, mapping or {}, "train.jsonl", wanted=wanted)
    return str(caught.value)


@pytest.mark.parametrize(
    ("columns", "wanted", "step"),
    [
        ("question answer", "answers", "--dataset_columns question=instruction,answer=output"),
        ("id Query Response", "answers", "--dataset_columns Query=instruction,Response=output"),
        ("instruction context response", "answers", "instruction=instruction,context=input,response=output"),
        ("query answers tools", "answers", "--dataset_columns query=instruction,answers=tool_calls"),
        ("conversation model turn", "answers", "--dataset_columns conversation=conversations"),
        ("url content", "answers", "--dataset_columns content=text"),
        ("prompt chosen rejected", "answers", "--objective dpo learns from pairs of answers"),
        ("prompt completion label", "pairs", "--objective kto learns from answers with a label"),
        ("messages id", "pairs", "--objective sft learns the answers"),
        ("prompt response_j response_k", "pairs", "prompt=instruction,response_j=chosen,response_k=rejected"),
        ("messages kto_tag", "rated", "--dataset_columns messages=completion,kto_tag=label"),
        ("question better worse", "answers", "--objective dpo --dataset_columns question=instruction,better=chosen"),
        ("a b", "answers", "say which column is which: --dataset_columns COLUMN=FIELD"),
    ],
)
def test_well_known_names_are_quoted_and_not_guessed(columns, wanted, step):
    assert step in refusal(columns.split(), wanted=wanted)


def test_a_mapping_that_is_quoted_keeps_what_is_to_be_ignored():
    message = refusal(["question", "answer", "images"], {"images": "ignore"})
    assert "question=instruction,answer=output,images=ignore" in message


def test_a_text_beside_its_answer_is_not_taken_for_a_document():
    message = refusal(["text", "summary"])
    assert "to learn each text as a whole: --dataset_columns text=text; " in message
    assert "to make a chat of each row: --dataset_columns text=instruction,summary=output" in message
    for mapping in ({"text": "text"}, {"summary": "ignore"}):
        assert choose_fields(["text", "summary"], mapping, "train.jsonl") == {"text": "text"}
    assert choose_fields(["text", "url", "id"], {}, "train.jsonl") == {"text": "text"}


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


def test_a_column_that_is_to_be_ignored_is_not_there():
    assert chosen(["messages", "text"], {"messages": "ignore"}) == {"text": "text"}
    assert "history" not in choose_fields(["instruction", "output"], {"history": "ignore"}, "train.jsonl")
    mapping = {"a": "ignore", "b": "ignore", "q": "text"}  # more than one, and keys of messages, which are no columns
    assert choose_fields(["q", "a"], mapping, "train.jsonl") == {"text": "q"}


def test_a_mapping_is_one_word_of_the_shell():
    _, value = shlex.split(columns_flag({"a; touch it": "messages"}))
    assert value == "a; touch it=messages"
    assert json.loads(shlex.split(columns_flag({"a,b": "text"}))[1]) == {"a,b": "text"}
