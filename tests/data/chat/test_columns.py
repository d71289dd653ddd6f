"""Which columns of a dataset are read: by the kit's names, or by a mapping; messages quote well-known names."""

import shlex

import pytest
from data_helpers import converted, unused_of

from kit.config.dataset_entry import column_mapping
from kit.data.chat.unused import Unused
from kit.data.kinds.columns import choose_fields, columns_flag
from kit.data.kinds.kinds import KINDS
from kit.system.errors import UserError


def chosen(columns, mapping=None):
    """Of the fields that are chosen, those that the first row has."""
    fields = choose_fields(dict.fromkeys(columns, "a"), mapping or {}, "train.jsonl")
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
    row = columns if isinstance(columns, dict) else dict.fromkeys(columns, "a")
    with pytest.raises(UserError) as caught:
        choose_fields(row, mapping or {}, "train.jsonl", kind=KINDS[wanted])
    return str(caught.value)


def test_a_wrong_mapping_is_reported():
    for mapping, message in (
        ({"question": "promt"}, "'promt' is no field; expected messages, tools, chat_template_kwargs, images, "),
        ({"question": "promt"}, "did you mean 'prompt'"),
        ({"questions": "prompt"}, "train.jsonl has no column 'questions'; expected one of question, answer, more"),
        ({"input": "prompt"}, "-> --dataset_columns none forgets those of a recipe"),
        ({"question": "prompt", "answer": "prompt"}, "prompt is given twice"),
        ({"question": "prompt"}, "columns question, answer, more; expected messages, or conversations, or prompt and"),
        (
            {"question": "prompt", "answer": "completion", "more": "input"},
            "dataset_columns more=input: input does not go with prompt and completion",
        ),
    ):
        assert message in refusal(["question", "answer", "more"], mapping)


def test_the_text_with_images_is_their_answer():
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
        ("prompt chosen rejected", "answers", "--objective dpo takes preference pairs"),
        ("text label", "ranking", "--objective classify takes texts with labels"),
        ("prompt response_j response_k", "preference", "response_j=chosen,response_k=rejected,prompt=prompt"),
        ("messages kto_tag", "unpaired_preference", "--dataset_columns kto_tag=label,messages=completion"),
        ("a b", "answers", "say which column is which: --dataset_columns COLUMN=FIELD"),
    ):
        assert step in refusal(columns.split(), wanted=wanted)
    message = refusal(["question", "answer", "images"], {"images": "ignore"})
    assert "question=instruction,answer=output,images=ignore" in message
    message = refusal(["question", "answer", "a,b"], {"a,b": "ignore"})
    assert '{"question": "instruction", "answer": "output", "a,b": "ignore"}' in message


ASKED, TOLD = [{"role": "user", "content": "2 + 2?"}], [{"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("row", "wanted", "mapping"),
    [
        (
            {"input": ASKED, "output": "4", "reasoning": "on", "system_prompt": "Think."},
            "answers",
            "input=prompt,output=completion,system_prompt=system",
        ),
        ({"prompt": ASKED, "solution": "4"}, "answers", "prompt=prompt,solution=completion"),
        (
            {"solution": "4", "question": "2 + 2?", "cot": None, "thinking_trajectories": ["Two."], "attempt": "4"},
            "answers",
            "question=instruction,attempt=output,thinking_trajectories=reasoning_content",
        ),
        (
            {"prompt": ASKED, "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"index": "a"}},
            "answers",
            "prompt=prompt,reward_model.ground_truth=completion",
        ),
        (
            {"input": {"messages": ASKED, "tools": []}, "preferred_output": TOLD, "non_preferred_output": ASKED + TOLD},
            "preference",
            "preferred_output=chosen,non_preferred_output=rejected,input.messages=prompt",
        ),
    ],
)
def test_a_mapping_is_proposed_by_the_first_values_too_and_works_as_it_is_printed(row, wanted, mapping):
    message = refusal(row, wanted=wanted)
    assert shlex.split(message.split("--dataset_columns ")[1])[0] == mapping
    fields = choose_fields(row, column_mapping(mapping), "train.jsonl", kind=KINDS[wanted])
    sample = converted(row, fields, kind=KINDS[wanted])
    assert isinstance(sample, dict), sample
    assert not Unused(KINDS[wanted].format_of(fields), fields, ()).check(row)


def test_a_tool_in_an_object_of_which_another_key_is_read_is_not_ignored_unseen():
    row = {"input": {"messages": [*ASKED, *TOLD], "tools": [{"name": "add"}]}}
    unused = unused_of(row, {"input.messages": "messages"})
    assert [problem.where for problem in unused.check(row)] == ["input.tools"]


def test_an_evaluation_set_with_our_columns_needs_no_mapping():
    mapping = {"question": "prompt", "answer": "completion"}

    def fields(*columns, may_lack=True):
        return {
            o: t
            for o, t in choose_fields(dict.fromkeys(columns, "a"), mapping, "eval.jsonl", may_lack).items()
            if t in columns
        }

    assert fields("prompt", "completion") == {"prompt": "prompt", "completion": "completion"}
    assert fields("question", "completion") == {"prompt": "question", "completion": "completion"}
    with pytest.raises(UserError, match=r"eval\.jsonl has no column 'answer'"):  # its text is not what was meant
        fields("question", "text")
    with pytest.raises(UserError, match=r"eval\.jsonl has no column 'question'"):  # training data must have them
        fields("prompt", "completion", may_lack=False)


def test_a_column_that_is_to_be_ignored_is_not_there():
    assert chosen(["messages", "text"], {"messages": "ignore"}) == {"text": "text"}
    assert "history" not in choose_fields(
        dict.fromkeys(["instruction", "output"]), {"history": "ignore"}, "train.jsonl"
    )
    mapping = {"a": "ignore", "b": "ignore", "q": "text"}  # more than one, and keys of messages, which are no columns
    assert choose_fields({"q": "a", "a": "b"}, mapping, "train.jsonl") == {"text": "q"}


def test_a_mapping_is_one_word_of_the_shell():
    _, value = shlex.split(columns_flag({"a; touch it": "messages"}))
    assert value == "a; touch it=messages"
