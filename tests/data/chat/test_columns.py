"""Which columns of a data set are read: by the kit's names, or by a mapping; messages quote well-known names."""

import shlex

import pytest

from kit.data.chat.columns import choose_fields, columns_flag
from kit.errors import UserError


def chosen(columns, mapping=None):
    """Of the fields that are chosen, those that the first row has."""
    fields = choose_fields(columns, mapping or {}, "train.jsonl")
    return {ours: theirs for ours, theirs in fields.items() if theirs in columns}


def test_the_first_format_whose_columns_are_there_is_taken():
    for columns, fields in (
        ("text input_ids output instruction conversations messages", ["messages"]),
        ("text output instruction completion prompt conversations tools", ["conversations", "tools"]),
        ("text output instruction completion prompt", ["prompt", "completion"]),
        ("text input_ids attention_mask labels", ["input_ids", "labels"]),
        ("text labels prompt summary", ["text"]),
    ):
        assert chosen(columns.split()) == {field: field for field in fields}


def test_named_columns_choose_the_format():
    columns = ["messages", "text", "question", "answer", "context"]
    mapped = chosen(columns, {"question": "prompt", "answer": "completion"})
    assert mapped == {"prompt": "question", "completion": "answer"}
    mapping = {"question": "instruction", "answer": "output", "context": "input"}
    assert chosen(columns, mapping) == {ours: theirs for theirs, ours in mapping.items()}
    assert chosen(columns, {"text": "text"}) == {"text": "text"}


def refusal(columns, mapping=None, wanted="answers"):
    with pytest.raises(UserError) as caught:
        choose_fields(columns, mapping or {}, "train.jsonl", wanted=wanted)
    return str(caught.value)


def test_a_wrong_mapping_is_reported():
    for mapping, message in (
        ({"question": "promt"}, "'promt' is no field; expected messages, tools, chat_template_kwargs, images, "),
        ({"question": "promt"}, "did you mean 'prompt'"),
        ({"questions": "prompt"}, "train.jsonl has no column 'questions'; expected one of question, answer, more"),
        ({"question": "prompt", "answer": "prompt"}, "prompt is given twice"),
        ({"question": "prompt"}, "columns question, answer, more; expected messages, or conversations, or prompt and"),
        (
            {"question": "prompt", "answer": "completion", "more": "input"},
            "dataset_columns more=input: input does not go with prompt and completion",
        ),
    ):
        assert message in refusal(["question", "answer", "more"], mapping)


def test_the_text_beside_pictures_is_their_answer():
    mapping = {"file_name": "images", "text": "output"}
    assert "file_name=images,text=output: the text is the answer" in refusal(
        ["file_name", "text"], {"file_name": "images"}
    )
    assert chosen(["file_name", "text"], mapping) == {"images": "file_name", "output": "text"}


def test_well_known_names_are_quoted_and_not_guessed():
    for columns, wanted, step in (
        ("question answer", "answers", "--dataset_columns question=instruction,answer=output"),
        ("image caption", "answers", "--dataset_columns image=images,caption=output"),
        ("instruction context response", "answers", "instruction=instruction,response=output,context=input"),
        ("url content", "answers", "--dataset_columns content=text"),
        ("prompt chosen rejected", "answers", "--objective dpo learns from pairs of answers"),
        ("text label", "compared", "--objective classify learns the labels of texts"),
        ("prompt response_j response_k", "pairs", "response_j=chosen,response_k=rejected,prompt=prompt"),
        ("messages kto_tag", "rated", "--dataset_columns kto_tag=label,messages=completion"),
        ("a b", "answers", "say which column is which: --dataset_columns COLUMN=FIELD"),
    ):
        assert step in refusal(columns.split(), wanted=wanted)
    message = refusal(["question", "answer", "images"], {"images": "ignore"})
    assert "question=instruction,answer=output,images=ignore" in message
    message = refusal(["question", "answer", "a,b"], {"a,b": "ignore"})
    assert '{"question": "instruction", "answer": "output", "a,b": "ignore"}' in message


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
