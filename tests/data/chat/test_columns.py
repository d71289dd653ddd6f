"""Which columns of a data set are read: by the kit's names, or by a mapping; well-known names are proposed."""

import pytest

from kit.data.chat.columns import choose_fields
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
        ({"question": "promt"}, "did you mean 'prompt'?"),
        ({"prompt": "question"}, "the other way round: --dataset_columns question=prompt"),
        ({"questions": "prompt"}, "train.jsonl has no column 'questions'; expected one of question, answer, more"),
        ({"questions": "prompt"}, "did you mean 'question'?"),
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


@pytest.mark.parametrize(
    ("columns", "ours"), [(["prompt", "chosen", "rejected"], "completion"), (["chosen", "rejected"], "messages")]
)
def test_for_preference_pairs_the_flag_that_learns_from_the_chosen_answers_is_proposed(columns, ours):
    with pytest.raises(UserError) as caught:
        choose_fields(columns, {}, "train.jsonl")
    fix = f"preference pairs are not trained on here; --dataset_columns chosen={ours} takes the chosen answers"
    assert str(caught.value).endswith(f"    -> {fix}")
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


@pytest.mark.parametrize(
    ("columns", "flag"),
    [
        (["id", "question", "answer"], "question=prompt,answer=completion"),
        (["query", "response"], "query=prompt,response=completion"),
        (["input", "output"], "input=prompt,output=completion"),
        (["Question", "Answer"], "Question=prompt,Answer=completion"),
        (["document", "summary"], "document=prompt,summary=completion"),
        (["article", "highlights", "id"], "article=prompt,highlights=completion"),
        (["instruction", "context", "response"], "instruction=instruction,context=input,response=output"),
        (["prompt", "response", "context"], "prompt=prompt,response=completion"),
        (["dialog"], "dialog=messages"),
        (["content", "url"], "content=text"),
    ],
)
def test_well_known_columns_are_proposed_as_the_flag_to_type(columns, flag):
    with pytest.raises(UserError) as caught:
        choose_fields(columns, {}, "train.jsonl")
    assert str(caught.value).endswith(f": --dataset_columns {flag}")
    mapping = dict(pair.split("=") for pair in flag.split(","))
    assert choose_fields(columns, mapping, "train.jsonl").items() >= {
        (ours, theirs) for theirs, ours in mapping.items()
    }


def test_a_text_beside_its_answer_is_not_taken_for_a_document():
    with pytest.raises(UserError) as caught:
        choose_fields(["text", "summary"], {}, "train.jsonl")
    fix = "--dataset_columns text=prompt,summary=completion; texts: --dataset_columns text=text"
    assert str(caught.value).endswith(fix)
    assert choose_fields(["text", "summary"], {"text": "text"}, "train.jsonl") == {"text": "text"}
    assert choose_fields(["text", "summary"], {"summary": "ignore"}, "train.jsonl") == {"text": "text"}
    assert choose_fields(["text", "url", "id"], {}, "train.jsonl") == {"text": "text"}


def test_a_column_that_is_to_be_ignored_is_not_there():
    assert chosen(["messages", "text"], {"messages": "ignore"}) == {"text": "text"}
    assert "history" not in choose_fields(["instruction", "output"], {"history": "ignore"}, "train.jsonl")
    mapping = {"a": "ignore", "b": "ignore", "q": "text"}  # more than one, and keys of messages, which are no columns
    assert choose_fields(["q", "a"], mapping, "train.jsonl") == {"text": "q"}
