"""Which columns of a data set are read: by the kit's names, or by a mapping; well-known names are proposed."""

import json
import re

import pytest
from data_helpers import ANSWER, USER

from kit.config.dataset_entry import DatasetEntry
from kit.data.chat.columns import NUM_TRIED, choose_fields
from kit.data.chat.columns_flag import Listed
from kit.data.chat.formats import to_sample
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
        ({"question": "promt"}, "did you mean --dataset_columns question=prompt"),
        ({"prompt": "question"}, "expected column=field\n    -> did you mean --dataset_columns question=prompt"),
        (
            {"prompt": "question", "anwser": "complettion"},
            "did you mean --dataset_columns question=prompt,answer=completion",
        ),
        ({"questions": "prompt"}, "train.jsonl has no column 'questions'; expected one of question, answer, more"),
        ({"questions": "prompt"}, "did you mean --dataset_columns question=prompt"),
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


ASKED, CHOSEN, REJECTED = [USER], [USER, ANSWER], [USER, {"role": "assistant", "content": "Go away"}]
TRANSCRIPT = "\n\nHuman: Hi\n\nAssistant:"
TRANSCRIPTS = {"chosen": f"{TRANSCRIPT} Hello", "rejected": f"{TRANSCRIPT} Go away"}
SHAREGPT = [{"from": "human", "value": "Hi"}], {"from": "gpt", "value": "Hello"}, {"from": "gpt", "value": "Go away"}
TEXTS = {"chosen": "Hello", "rejected": "Go away"}
LISTS = {"chosen": CHOSEN, "rejected": REJECTED}
PROMPT = {"role": "user", "content": "Hi"}


def learned(sample):
    """The last two messages of what is learned from a sample in our form, and the rejected answer of a pair."""
    messages = sample["messages"] if "messages" in sample else sample["prompt"] + sample.get("completion", [])
    return [*messages, *sample.get("chosen", [])][-2:], sample.get("rejected")


@pytest.mark.parametrize(
    ("row", "of_pairs", "of_answers"),
    [
        (LISTS, "", "chosen=messages"),
        ({"prompt": "Hi", **LISTS}, "", "chosen=messages"),
        ({"prompt": ASKED, "chosen": [ANSWER], "rejected": REJECTED[1:]}, "", "prompt=instruction,chosen=output"),
        (
            {"prompt": ASKED, "chosen": [ANSWER], "rejected": REJECTED[1:], "tools": [{"name": "add"}]},
            "",
            "prompt=prompt,chosen=completion",
        ),
        (
            {name: [*SHAREGPT[0], answer] for name, answer in zip(("chosen", "rejected"), SHAREGPT[1:], strict=True)},
            "",
            "chosen=conversations",
        ),
        ({"instruction": "Hi", **TEXTS}, "", "instruction=instruction,chosen=output"),
        (
            {"system": "Be kind", "question": "Hi", **TEXTS},
            "question=instruction",
            "question=instruction,chosen=output",
        ),
        ({"prompt": ASKED, **TEXTS}, "", "prompt=instruction,chosen=output"),
        (
            {"prompt": ASKED, "better": "Hello", "worse": "Go away"},
            "better=chosen,worse=rejected",
            "prompt=instruction,better=output",
        ),
        (
            {"query": "Hi", "accepted": "Hello", "rejected": "Go away", "system_prompt": "Be kind"},
            "query=instruction,accepted=chosen,system_prompt=system",
            "query=instruction,accepted=output,system_prompt=system",
        ),
    ],
)
def test_for_preference_pairs_the_objective_is_named_and_the_flag_that_learns_the_better_answers(
    row, of_pairs, of_answers
):
    better = next(iter(set(row) & {"chosen", "better", "accepted"}))
    flags = f"--objective dpo --dataset_columns {of_pairs}" if of_pairs else "--objective dpo"
    assert refusal(row).endswith(
        f"-> {flags} learns from both answers; or --dataset_columns {of_answers} learns the answers in {better} only"
    )
    for wanted, flag in (("answers", of_answers), ("pairs", of_pairs)):
        sample = to_sample(row, choose_fields(list(row), mapping_of(flag), "train.jsonl", rows=[row], wanted=wanted))
        assert learned(sample) == ([PROMPT, ANSWER], REJECTED[1:] if wanted == "pairs" else None)


def test_for_preference_pairs_in_transcripts_the_message_says_that_only_text_can_be_learned():
    assert refusal(TRANSCRIPTS).endswith(
        "-> --objective dpo learns from both answers; or --dataset_columns chosen=text learns chosen only, as plain "
        "text with its question"
    )
    fields = choose_fields(list(TRANSCRIPTS), {"chosen": "text"}, "train.jsonl")
    assert to_sample(TRANSCRIPTS, fields) == {"text": TRANSCRIPTS["chosen"]}
    answers_alone = {"trajectory": ASKED, **TEXTS}
    assert "text" not in refusal(answers_alone).rpartition("->")[2]  # what was asked would be lost


def test_where_now_this_and_now_that_answer_is_better_the_message_says_when_the_flag_is_right():
    row = {"prompt": "Hi", "response_a": "Hello", "response_b": "Go away", "winner": "a"}
    flag = "--dataset_columns prompt=instruction,response_a=chosen,response_b=rejected"
    message = refusal(row)
    assert f"-> if response_a is always the better one, --objective dpo {flag} learns from both answers; or" in message
    assert message.endswith(
        "or if response_b is the better one in some rows, write the better one into a column chosen"
    )
    assert f"-> if response_a is always the better one: {flag} makes a chat" in refusal(row, wanted="pairs")


@pytest.mark.parametrize(
    ("row", "flag"),
    [
        ({"system": "Be kind", "question": "Hi", **TEXTS}, "question=instruction"),
        ({"question": "Hi", **TEXTS}, "question=instruction"),
        ({"question": "Hi", "context": "Ann", **TEXTS}, "question=instruction,context=input"),
        ({"conversations": SHAREGPT[0], "chosen": SHAREGPT[1], "rejected": SHAREGPT[2]}, "conversations=prompt"),
        ({"trajectory": ASKED, **TEXTS}, "trajectory=prompt"),
        ({"prompt": "Hi", "better": "Hello", "worse": "Go away"}, "prompt=instruction,better=chosen,worse=rejected"),
        ({"better": CHOSEN, "worse": REJECTED}, "better=chosen,worse=rejected"),
        ({"system": "Be kind", "prompt": "Hi", **TEXTS}, "prompt=instruction"),
        ({"prompt": "user: Hi", **LISTS}, "prompt=ignore"),
        ({"prompt": "Hi", "instruction": "Say Hi", **TEXTS}, "prompt=ignore"),
        ({"prompt": "Say Hi", "instruction": "Hi", **TEXTS}, "instruction=ignore"),
    ],
)
def test_pairs_in_other_columns_are_refused_with_the_flag_that_reads_them(row, flag):
    message = refusal(row, wanted="pairs")
    assert flag in flags_in(message)
    fields = choose_fields(list(row), mapping_of(flag), "train.jsonl", rows=[row], wanted="pairs")
    assert isinstance(to_sample(row, fields), dict)


def test_for_texts_both_flags_are_named_and_do_what_is_said():
    row = {"question": "Hi", **TEXTS}
    message = refusal(row, wanted="pairs")
    chat, text = "--dataset_columns question=instruction", "--dataset_columns question=prompt"
    assert message.endswith(f"-> {chat} makes a chat of each row; or {text} joins the texts")
    fields = choose_fields(list(row), {"question": "prompt"}, "train.jsonl", wanted="pairs")
    assert to_sample(row, fields) == {"prompt": "Hi", **TEXTS}
    rated = {"question": "Hi", "answer": "Hello", "label": True}
    assert refusal(rated, wanted="rated").endswith(
        "-> --dataset_columns question=instruction,answer=completion makes a chat of each row; or "
        "--dataset_columns question=prompt,answer=completion joins the texts"
    )


def test_a_question_that_is_not_read_is_not_replaced_by_what_two_answers_begin_with():
    answers = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    message = refusal({"question": "Which colour?", **answers}, wanted="pairs")
    assert "columns question, chosen, rejected, of which none is read as the prompt" in message
    assert flags_in(message) == ["question=instruction", "question=prompt", "question=ignore"]
    fields = choose_fields(
        ["question", *answers], {"question": "ignore"}, "train.jsonl", wanted="pairs", rows=[answers]
    )
    assert to_sample(answers, fields) == {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    # What stands beside whole transcripts and conversations is not their question.
    for pair in (TRANSCRIPTS, LISTS):
        assert choose_fields(["source", *pair], {}, "train.jsonl", rows=[{"source": "web", **pair}], wanted="pairs")


@pytest.mark.parametrize(
    ("row", "flag"),
    [
        ({"messages": CHOSEN, "label": True}, "messages=completion"),
        ({"conversations": [*SHAREGPT[0], SHAREGPT[1]], "kto_tag": True}, "conversations=completion,kto_tag=label"),
        (
            {"query": "Hi", "response": "Hello", "thumbs_up": False},
            "query=instruction,response=completion,thumbs_up=label",
        ),
        ({"prompt": ASKED, "completion": [ANSWER], "kto_tag": False}, "kto_tag=label"),
    ],
)
def test_answers_with_a_label_in_other_columns_are_refused_with_the_flag_that_reads_them(row, flag):
    assert flags_in(refusal(row, wanted="rated"))[0] == flag
    assert f"--objective kto --dataset_columns {flag} learns from answers with a label" in refusal(row, wanted="pairs")
    sample = to_sample(row, choose_fields(list(row), mapping_of(flag), "train.jsonl", rows=[row], wanted="rated"))
    assert (sample["prompt"], sample["completion"]) == ([PROMPT], [ANSWER]) and isinstance(sample["label"], bool)


@pytest.mark.parametrize(
    ("row", "wanted", "fix"),
    [
        ({"messages": CHOSEN}, "pairs", "--objective sft learns the answers"),
        ({"text": "Hello"}, "rated", "--objective sft learns the answers"),
        (
            {"question": "Hi", "answer": "Hello"},
            "pairs",
            "--objective sft --dataset_columns question=instruction,answer=output learns the answers",
        ),
        (
            {"prompt": "Hi", "completion": "Hello", "label": True},
            "pairs",
            "--objective kto learns from answers with a label; or --objective sft learns the answers",
        ),
        # An answer marked as bad would not be learned.
        (
            {"prompt": "Hi", "completion": "Hello", "label": False},
            "pairs",
            "--objective kto learns from answers with a label",
        ),
        (
            LISTS,
            "rated",
            "--objective dpo learns from pairs of answers; or --objective sft --dataset_columns chosen=messages learns "
            "the answers",
        ),
        ({"a": 1}, "pairs", "say which column is which: --dataset_columns COLUMN=FIELD"),
        ({"prompt": 1, "chosen": 2, "rejected": 3}, "pairs", "none"),
    ],
)
def test_rows_of_another_kind_are_refused_with_the_objective_that_learns_from_them(row, wanted, fix):
    rows = [row]
    if fix == "none":  # each row is reported
        assert choose_fields(list(row), {}, "train.jsonl", rows=rows, wanted=wanted)
        return
    message = refusal(row, wanted=wanted)
    expected = "chosen and rejected" if wanted == "pairs" else "label and completion"
    assert message.endswith(f"; expected {expected}\n    -> {fix}")


def test_a_mapping_that_was_given_is_replaced_by_the_one_that_goes_with_the_objective():
    row = {"prompt": "Hi", **TEXTS}
    message = refusal(row, mapping={"prompt": "instruction", "chosen": "outptu"})
    assert "did you mean --dataset_columns prompt=instruction,chosen=output" in message
    message = refusal({"prompt": "Hi", "better": "a", "worse": "b"}, mapping={"prompt": "instruction"})
    assert "--objective dpo --dataset_columns prompt=instruction,better=chosen,worse=rejected" in message
    # With the old mapping, these columns would not be read: so they are named although they need no mapping.
    message = refusal(row, mapping={"chosen": "completion", "prompt": "instruction"})
    assert "--objective dpo --dataset_columns chosen=chosen,rejected=rejected,prompt=prompt learns" in message


def test_pairs_to_evaluate_on_are_refused_without_another_objective_if_there_are_data_to_train_on():
    entries = (DatasetEntry(path="eval.jsonl"),)

    def fix(row, wanted, is_alone):
        among = Listed("eval_dataset", entries, 0, is_alone, keeps_objective=not is_alone)
        with pytest.raises(UserError) as caught:
            choose_fields(list(row), {}, "eval.jsonl", rows=[row], wanted=wanted, among=among)
        return str(caught.value).partition("-> ")[2]

    assert fix(LISTS, "answers", is_alone=True).startswith("--objective dpo learns from both answers; or")
    assert fix(LISTS, "answers", is_alone=False) == (
        "--eval_dataset '[{path: eval.jsonl, columns: {chosen: messages}}]' learns the answers in chosen only"
    )
    assert fix({"messages": CHOSEN}, "pairs", is_alone=True) == "--objective sft learns the answers"
    assert fix({"messages": CHOSEN}, "pairs", is_alone=False).startswith("--eval_dataset null --eval_split_size 0.05")


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


def refusal(*rows, mapping=None, wanted="answers"):
    """The message with which a data set of ``rows`` is refused."""
    with pytest.raises(UserError) as caught:
        choose_fields(list(rows[0]), mapping or {}, "train.jsonl", rows=rows, wanted=wanted)
    return str(caught.value)


def flags_in(message):
    """The mappings that a message names."""
    return re.findall(r"--dataset_columns ((?:\w+=\w+,?)+)", message)


def mapping_of(flag):
    return dict(pair.split("=") for pair in flag.split(",")) if flag else {}


CALLS = json.dumps([{"name": "add", "arguments": {"a": 2}}])


@pytest.mark.parametrize(
    ("row", "flag"),
    [
        ({"id": "1", "question": "a", "answer": "b"}, "question=instruction,answer=output"),
        ({"query": "a", "response": "b"}, "query=instruction,response=output"),
        ({"input": "a", "output": "b"}, "input=instruction,output=output"),
        ({"Question": "a", "Answer": "b"}, "Question=instruction,Answer=output"),
        ({"document": "a", "summary": "b"}, "document=instruction,summary=output"),
        ({"article": "a", "highlights": "b", "id": "1"}, "article=instruction,highlights=output"),
        (
            {"instruction": "a", "context": "c", "response": "b"},
            "instruction=instruction,context=input,response=output",
        ),
        ({"prompt": "a", "response": "b", "context": "c"}, "prompt=instruction,context=input,response=output"),
        (
            {"query": "a", "response": "b", "system_prompt": "c"},
            "query=instruction,response=output,system_prompt=system",
        ),
        (
            {"input": [USER], "output": "b", "system_prompt": "c"},
            "input=instruction,output=output,system_prompt=system",
        ),
        ({"query": "a", "answers": CALLS, "tools": '[{"name": "add"}]'}, "query=instruction,answers=tool_calls"),
        (
            {"query": "a", "answers": CALLS, "functions": [{"name": "add"}]},
            "query=instruction,answers=tool_calls,functions=tools",
        ),
        ({"dialog": [USER, ANSWER]}, "dialog=messages"),
        ({"dialog": json.dumps([USER, ANSWER])}, "dialog=messages"),
        ({"exchange": [USER, ANSWER]}, "exchange=messages"),
        ({"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, "messages=conversations"),
        ({"messages": [{"role": "human", "content": "Hi"}, ANSWER]}, "messages=conversations"),
        (
            {"dialog": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system_prompt": "c"},
            "dialog=conversations,system_prompt=system",
        ),
        ({"conversations": ["Hi", "Hello"]}, "conversations=alternating_turns"),
        ({"data": ["Hi", "Hello"], "id": "1"}, "data=alternating_turns"),
        ({"conversation": [{"input": "Hi", "output": "Hello"}]}, "conversation=alternating_turns"),
        ({"prompt": [USER], "completion": "Hello"}, "prompt=instruction,completion=output"),
        ({"messages": [USER], "answer": "Hello"}, "messages=instruction,answer=output"),
        ({"messages": [USER], "question": [3], "answer": "Hello"}, "messages=instruction,answer=output"),
        ({"content": "a", "url": "b"}, "content=text"),
    ],
)
def test_well_known_columns_are_proposed_as_the_flag_to_type_and_the_flag_works(row, flag):
    message = refusal(row)
    assert re.search(f": --dataset_columns {flag}( makes a chat of each row.*)?$", message), message
    fields = choose_fields(list(row), mapping_of(flag), "train.jsonl", rows=[row])
    assert fields.items() >= {(ours, theirs) for theirs, ours in mapping_of(flag).items()}
    assert isinstance(to_sample(row, fields), dict)


def test_question_and_answer_are_proposed_as_a_chat_and_as_plain_text():
    message = refusal({"question": "a", "answer": "b"})
    assert message.endswith(
        "if question asks and answer answers: --dataset_columns question=instruction,answer=output makes a chat of "
        "each row; or --dataset_columns question=prompt,answer=completion joins the two as plain text"
    )
    context = refusal({"instruction": "a", "context": "c", "response": "b"})
    assert "plain text" not in context  # the context would be lost


def test_columns_with_more_text_than_the_answer_are_named():
    row = {"question": "a", "answer": "bb", "trace": ["ccc"], "grade": "d", "system_prompt": "eee", "id": 17}
    assert refusal(row).endswith("; longer than answer, and not read: trace (map thoughts to reasoning_content)")


@pytest.mark.parametrize(
    ("rows", "has_flag"),
    [
        ([{"question": "a", "answer": ["b"]}], False),
        ([{"question": "a", "answer": ["b"]}] + [{"question": "a", "answer": "b"}] * 2, True),
        ([{"question": "a", "answer": "b"}] + [{"question": "a", "answer": ["b"]}] * 2, False),
        ([{"dialog": [USER]}], False),
        ([{"dialog": [ANSWER]}], False),  # an answer to nothing is not what was meant
        ([{"choices": ["a", "b"]}], False),  # not known as turns
        ([{"dialog": "Hi"}], False),
        ([], False),
    ],
)
def test_a_flag_is_proposed_only_if_it_reads_most_of_the_first_rows(rows, has_flag):
    with pytest.raises(UserError) as caught:
        choose_fields(list(rows[0]) if rows else ["question", "answer"], {}, "train.jsonl", rows=rows)
    assert ("=instruction" in str(caught.value)) == has_flag
    assert has_flag or not re.search("--dataset_columns (?!COLUMN=FIELD)", str(caught.value))


def test_only_a_few_rows_are_read_to_try_a_flag():
    def rows():
        for _ in range(NUM_TRIED):
            yield {"question": "a", "answer": "b"}
        raise AssertionError("read on")

    with pytest.raises(UserError):
        choose_fields(["question", "answer"], {}, "train.jsonl", rows=rows())


def test_a_proposed_flag_keeps_what_is_to_be_ignored():
    row = {"question": "a", "answer": "b", "images": ["c"]}
    flag = "question=instruction,answer=output,images=ignore"
    assert f"--dataset_columns {flag} makes" in refusal(row, mapping={"images": "ignore"})
    assert "--dataset_columns question" not in refusal(row)
    thoughts = {"dialog": [{**USER, "thinking": "a"}, ANSWER]}  # refused: only answers have thoughts
    flag = "dialog=messages,dialog.thinking=ignore"
    assert refusal(thoughts, mapping={"dialog.thinking": "ignore"}).endswith(f"--dataset_columns {flag}")


def test_preference_pairs_whose_prompts_have_the_columns_of_a_format_are_said_too():
    row = {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "a"}, "rejected": {}}
    message = refusal(row)
    assert message.startswith("error: train.jsonl conversations: no assistant turn")
    assert "-> preference pairs, and none of the formats holds them: convert each row to {" in message
    complete = row | {"rejected": {"from": "gpt", "value": "b"}}
    flag = "--objective dpo --dataset_columns conversations=prompt"
    assert refusal(complete).endswith(f"-> {flag} learns from both answers")


def test_an_answer_marked_as_bad_is_not_learned_and_the_objective_that_can_is_named():
    message = refusal({"question": "a", "answer": "b", "label": False})
    flag = "--objective kto --dataset_columns question=instruction,answer=completion"
    assert message.endswith(f"-> {flag} learns from answers with a label")
    # Also if most are good ones.
    rows = [{"prompt": "a", "completion": "b", "label": i > 0} for i in range(4)]
    assert refusal(*rows, wanted="pairs").endswith("-> --objective kto learns from answers with a label")


@pytest.mark.parametrize(
    "row",
    [
        {"system": "You call functions", "chat": "USER: Hi\n\nASSISTANT: Hello <|endoftext|>"},
        {"dialog": [3, 4]},
        {"prompt": {"text": "Hi", "role": "prompter", "replies": [{"text": "Hello", "role": "assistant"}]}, "id": "1"},
    ],
)
def test_where_no_format_holds_the_rows_the_message_says_so(row):
    message = refusal(row)
    assert "-> none of the formats holds these rows: convert each conversation to {" in message
    assert message.endswith("one for each path from a prompt to an answer") == ("prompt" in row)
    unknown = refusal({"frage": "a", "antwort": "b"})
    flag = "--dataset_columns frage=instruction,antwort=output"
    assert unknown.endswith(f"-> if frage asks and antwort answers: {flag}; other columns in the same way")
    assert refusal({"a": 1}).endswith("-> say which column is which: --dataset_columns COLUMN=FIELD")


def test_a_mapping_that_does_not_fit_the_rows_is_refused_with_the_one_that_does():
    row = {"conversation": [{"input": "Hi", "output": "Hello"}]}
    message = refusal(row, mapping={"conversation": "messages"})
    assert message.startswith("error: train.jsonl messages[0].role: missing; expected system, user")
    assert message.endswith("--dataset_columns conversation=alternating_turns")
    bad = {"conversation": [{"input": "Hi", "exit": "Hello"}]}  # no other fits: tokenising reports each row
    assert choose_fields(["conversation"], {"conversation": "messages"}, "train.jsonl", rows=[bad])


def test_a_text_beside_its_answer_is_not_taken_for_a_document():
    row = {"text": "a", "summary": "b"}
    message = refusal(row)
    assert "--dataset_columns text=instruction,summary=output makes a chat" in message
    assert "-> to learn each text as a whole: --dataset_columns text=text; or if text asks" in message
    assert "not read: text" not in message
    assert choose_fields(list(row), {"text": "text"}, "train.jsonl", rows=[row]) == {"text": "text"}
    assert choose_fields(list(row), {"summary": "ignore"}, "train.jsonl", rows=[row]) == {"text": "text"}
    assert choose_fields(["text", "url", "id"], {}, "train.jsonl") == {"text": "text"}


def test_a_column_that_is_to_be_ignored_is_not_there():
    assert chosen(["messages", "text"], {"messages": "ignore"}) == {"text": "text"}
    assert "history" not in choose_fields(["instruction", "output"], {"history": "ignore"}, "train.jsonl")
    mapping = {"a": "ignore", "b": "ignore", "q": "text"}  # more than one, and keys of messages, which are no columns
    assert choose_fields(["q", "a"], mapping, "train.jsonl") == {"text": "q"}


def test_a_column_in_a_proposed_flag_is_one_word_of_the_shell():
    with pytest.raises(UserError) as caught:
        choose_fields(["a; touch it"], {"messages": "a; touch it"}, "train.jsonl")
    assert "--dataset_columns 'a; touch it=messages'" in str(caught.value)


def test_the_index_that_pandas_writes_is_not_proposed_as_a_question():
    index = {"Unnamed: 0": "0"}
    assert "--dataset_columns mail=instruction,reply=output" in refusal(
        {**index, "subject": "Kettle", "mail": "Hello, my kettle never came.", "reply": "Dear Jo, we are sorry."}
    )
    assert "--dataset_columns frage=instruction,antwort=output" in refusal({**index, "frage": "a", "antwort": "b"})
    assert "if frage holds texts: --dataset_columns frage=text" in refusal({**index, "frage": "a"})
