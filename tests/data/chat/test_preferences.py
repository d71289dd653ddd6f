"""The prompt of preferences: found wherever a data set has it, and the same for every answer; else a problem."""

import json

import pytest
from data_helpers import ANSWER, SYSTEM, USER

from kit.data.chat.columns import choose_fields
from kit.data.chat.formats import to_sample
from kit.data.chat.preferences import is_transcript, messages_of

OTHER = {"role": "assistant", "content": "Go away"}
MORE, LAST, WORSE_LAST = (
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye now"},
    {"role": "assistant", "content": "At last"},
)
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "3"}
ADD = {"type": "function", "function": {"name": "add"}}
TEXTS = {"chosen": "Hello", "rejected": "Go away"}
ANSWERS = {"chosen": [ANSWER], "rejected": [OTHER]}
IN_MESSAGES = {"prompt": [USER], **ANSWERS}
WHOLE = {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}


def sample_of(row, wanted="pairs", **mapping):
    """The sample that a row becomes, or what is wrong with it as one string. ``mapping``: our field to their column."""
    fields = choose_fields(list(row), {theirs: ours for ours, theirs in mapping.items()}, "train.jsonl", wanted=wanted)
    sample = to_sample(row, fields)
    return "\n".join(map(str, sample)) if isinstance(sample, list) else sample


def said(speaker, value):
    return {"from": speaker, "value": value}


# Where the prompt comes from


@pytest.mark.parametrize("sample", [{"prompt": "Hi", **TEXTS}, IN_MESSAGES, {**IN_MESSAGES, "tools": [ADD]}])
def test_a_pair_in_our_form_stays_as_it_is(sample):
    assert sample_of(sample) == sample
    assert sample_of({"source": "web", "score_chosen": 8.5, **sample}) == sample


@pytest.mark.parametrize(
    "row",
    [
        WHOLE,
        {"prompt": "Hi", **WHOLE},  # as UltraFeedback, where the prompt is there twice
        {"prompt": " Hi\n", **WHOLE},
        {"prompt": [USER], **WHOLE},
        {"prompt": [USER], **TEXTS},
        {"prompt": "Hi", **ANSWERS},
        {"instruction": "Hi", **TEXTS},
        {"instruction": "Hi", "input": "", "system": None, **TEXTS},
        {"instruction": "Hi", **ANSWERS},
        {"instruction": "Hi", **WHOLE},
        {"prompt": [said("human", "Hi")], "chosen": said("gpt", "Hello"), "rejected": said("gpt", "Go away")},
        {"prompt": USER, "chosen": ANSWER, "rejected": OTHER},
        {
            "chosen": [said("human", "Hi"), said("gpt", "Hello")],
            "rejected": [said("human", "Hi"), said("gpt", "Go away")],
        },
    ],
)
def test_the_prompt_is_found_in_its_column_or_at_the_beginning_of_both_answers(row):
    assert sample_of(row) == IN_MESSAGES
    cells = {name: value if isinstance(value, str | None) else json.dumps(value) for name, value in row.items()}
    assert sample_of(cells) == IN_MESSAGES


def test_of_several_turns_all_that_both_have_in_common_is_the_prompt():
    before = [SYSTEM, USER, ANSWER, MORE]
    expected = {"prompt": before, "chosen": [LAST], "rejected": [WORSE_LAST]}
    whole = {"chosen": [*before, LAST], "rejected": [*before, WORSE_LAST]}
    assert (
        sample_of(whole) == sample_of({"prompt": "Hi", **whole}) == sample_of({"prompt": before, **whole}) == expected
    )


def test_answers_may_have_turns_of_their_own():
    row = {"chosen": [USER, ANSWER, MORE, LAST], "rejected": [USER, OTHER]}
    assert sample_of(row) == {"prompt": [USER], "chosen": [ANSWER, MORE, LAST], "rejected": [OTHER]}
    # A prompt that is given is not made longer.
    row = {"prompt": [USER], "chosen": [ANSWER, MORE, LAST], "rejected": [ANSWER, MORE, WORSE_LAST]}
    assert sample_of(row) == row
    calls = {"prompt": [USER], "chosen": [CALL, RESULT, ANSWER], "rejected": [OTHER], "tools": json.dumps([ADD])}
    assert sample_of(calls) == {**calls, "tools": [ADD]}


def test_an_answer_with_which_the_other_begins_is_an_answer():
    row = {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, MORE, LAST]}
    assert sample_of(row) == {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER, MORE, LAST]}
    assert sample_of({"chosen": "Say it: Hello", "rejected": "Say it: Hello there"}) == {
        "prompt": "Say it:",
        "chosen": " Hello",
        "rejected": " Hello there",
    }


def test_columns_beside_the_question_are_part_of_the_prompt():
    row = {"system": SYSTEM["content"], "instruction": "Hi", "input": "Ann", **TEXTS}
    assert sample_of(row) == {"prompt": [SYSTEM, {"role": "user", "content": "Hi\n\nAnn"}], **ANSWERS}
    assert sample_of({"system": SYSTEM["content"], **IN_MESSAGES})["prompt"] == [SYSTEM, USER]
    # One that the prompt has already counts once.
    assert sample_of({"system": SYSTEM["content"], "prompt": [SYSTEM, USER], **ANSWERS})["prompt"] == [SYSTEM, USER]
    assert sample_of({"chat_template_kwargs": '{"a": 1}', **IN_MESSAGES})["chat_template_kwargs"] == {"a": 1}


HELLO = "\n\nHuman: Hi\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"chosen": f"{HELLO} Hello", "rejected": f"{HELLO} Go away"}, HELLO),
        # Answers that begin alike do not lengthen the prompt.
        ({"chosen": f"{HELLO} Hello there", "rejected": f"{HELLO} Hello you"}, HELLO),
        ({"chosen": f"{HELLO} Hello{HELLO} a", "rejected": f"{HELLO} Hello{HELLO} b"}, f"{HELLO} Hello{HELLO}"),
        ({"chosen": f"{HELLO} Hello{HELLO} a", "rejected": f"{HELLO} Bye{HELLO} b"}, HELLO),
        ({"prompt": HELLO, "chosen": f"{HELLO} Hello", "rejected": f"{HELLO} Go away"}, HELLO),
        ({"prompt": HELLO, "chosen": " Hello", "rejected": " Go away"}, HELLO),
    ],
)
def test_the_prompt_of_a_transcript_ends_with_the_turn_of_the_assistant(row, prompt):
    sample = sample_of(row)
    assert sample["prompt"] == prompt
    both = [sample["prompt"] + sample[name] for name in ("chosen", "rejected")]
    assert both == [prompt + row[name].removeprefix(prompt) for name in ("chosen", "rejected")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue and wide", "The sky is blue", "The sky is"),  # no word is cut in two
        ("Farbe: größer", "Farbe: größte", "Farbe:"),
        ("Q\nA", "Q\nB", "Q"),
    ],
)
def test_the_prompt_of_other_texts_is_the_words_with_which_both_begin(chosen, rejected, prompt):
    sample = sample_of({"chosen": chosen, "rejected": rejected})
    assert sample["prompt"] == prompt
    assert [prompt + sample["chosen"], prompt + sample["rejected"]] == [chosen, rejected]


def test_a_text_that_answers_repeat_is_not_taken_out_of_them():
    row = {"prompt": "Hi", "chosen": "Hi Ann", "rejected": "Hi you"}
    assert sample_of(row) == row
    # Nor is JSON in a text taken for messages.
    for texts in (('["Ann"]', "[]"), ('{"name": "Ann"}', "{}"), ('{"a": 1, "a": 2}', '[{"a": 1, "a": 2}]')):
        row = {"prompt": "Who?", "chosen": texts[0], "rejected": texts[1]}
        assert sample_of(row) == row


def test_a_transcript_becomes_messages():
    prompt = f"{HELLO} Hello\n\nHuman: Bye\n\nAssistant:"
    assert messages_of(prompt, " Bye now") == ([USER, ANSWER, MORE], [LAST])
    answer = " Hello\n\nHuman: Bye\n\nAssistant: Bye now"
    assert messages_of(HELLO, answer) == ([USER], [ANSWER, MORE, LAST])
    assert messages_of(HELLO, " Hello\n\nHuman:")[1][-1] == {"role": "user", "content": ""}
    assert is_transcript(prompt) and is_transcript(f"{HELLO} ")
    assert not any(map(is_transcript, ("Hi", "Human: Hi\n\nAssistant:", f"Read: {HELLO}", f"{HELLO} Hello")))


# Rated answers


RATED = {"prompt": [USER], "completion": [ANSWER], "label": True}


@pytest.mark.parametrize(
    "row",
    [
        RATED,
        {"completion": [USER, ANSWER], "label": True},
        {"prompt": "Hi", "completion": [USER, ANSWER], "label": True},
        {"prompt": "Hi", "completion": ANSWER, "label": True},
        {"instruction": "Hi", "completion": "Hello", "label": True},
        {"completion": json.dumps([USER, ANSWER]), "label": "true"},
        {"completion": [said("human", "Hi"), said("gpt", "Hello")], "label": "True "},
    ],
)
def test_a_rated_answer_has_the_prompt_that_is_given_or_stands_before_it(row):
    assert sample_of(row, "rated") == RATED
    assert sample_of({**row, "label": False}, "rated") == {**RATED, "label": False}


def test_of_a_rated_conversation_the_last_answer_is_rated():
    row = {"completion": [USER, ANSWER, MORE, LAST], "label": False}
    assert sample_of(row, "rated") == {"prompt": [USER, ANSWER, MORE], "completion": [LAST], "label": False}
    assert sample_of({"prompt": "Hi", **row}, "rated") == sample_of(row, "rated")
    transcript = {"completion": f"{HELLO} a{HELLO} b", "label": False}
    assert sample_of(transcript, "rated") == {"prompt": f"{HELLO} a{HELLO}", "completion": " b", "label": False}
    text = {"prompt": "Hi", "completion": "Hello", "label": True}
    assert sample_of(text, "rated") == text


@pytest.mark.parametrize("label", [0, 1, 1.0, "yes", "1", "", None, [], -1])
def test_a_label_that_is_no_truth_value_is_a_problem(label):
    problem = sample_of({**RATED, "label": label}, "rated")
    assert problem.startswith("label: ") and problem.endswith("; expected true (a good answer) or false")


# What is refused


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "Hi", "chosen": "Hello", "rejected": None}, "rejected: null; expected a string"),
        ({"prompt": "Hi", "chosen": "", "rejected": "b"}, "chosen: empty; expected text"),
        ({"prompt": "Hi", "chosen": "a", "rejected": " \n"}, "rejected: empty"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "\u200b"}, "rejected: only invisible characters (U+200B)"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "\ud83d"}, "rejected: half of a surrogate pair"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "b"}, "chosen: a number; expected a string"),
        ({"prompt": "", **TEXTS}, "prompt: empty; expected text"),
        ({"prompt": None, **TEXTS}, "prompt: null; expected a prompt in every row, or in none"),
        ({"prompt": 3, **TEXTS}, "prompt: a number; expected a string"),
        ({"prompt": "Hi", "chosen": [ANSWER], "rejected": "b"}, "chosen: chosen is a list, rejected is a string"),
        ({"prompt": "Hi", "chosen": None, "rejected": [OTHER]}, "chosen: chosen is null, rejected is a list"),
        ({"prompt": [], **ANSWERS}, "prompt: empty; expected a list of messages"),
        ({"prompt": [USER], "chosen": [], "rejected": [OTHER]}, "chosen: empty; expected a list of messages"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [OTHER]}, "chosen: no assistant turn"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER | {"content": " "}]}, "rejected[0].content: empty"),
        (
            {"prompt": [USER], "chosen": [{"role": "bot2", "content": "a"}], "rejected": [OTHER]},
            "chosen[0].role: found",
        ),
        ({"prompt": [USER | {"role": "x"}], **ANSWERS}, "prompt[0].role: found 'x'"),
        # The prompts differ.
        ({"chosen": [USER, ANSWER], "rejected": [MORE, OTHER]}, "chosen and rejected: the prompts differ"),
        (
            {"prompt": [USER], "chosen": [MORE, ANSWER], "rejected": [OTHER]},
            "chosen[0]: a message of the user: the prom",
        ),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [MORE, OTHER]}, "rejected[0]: a message of the user"),
        ({"prompt": "Hi", "chosen": [MORE, ANSWER], "rejected": [MORE, OTHER]}, "chosen[0]: a message of the user"),
        ({"prompt": [SYSTEM, USER], **WHOLE}, "chosen[0]: a message of the user: the prompts differ"),
        (
            {"chosen": [USER, ANSWER, MORE, LAST], "rejected": [USER, ANSWER, USER, LAST]},
            "chosen and rejected: the prompts differ",
        ),
        ({"prompt": [USER, ANSWER], "chosen": [USER, ANSWER], "rejected": [OTHER]}, "chosen: ends with the prompt"),
        # There is none.
        (ANSWERS, "chosen and rejected: no prompt before the answer; expected conversations that begin with the same"),
        (TEXTS, "chosen and rejected: no prompt: chosen and rejected begin differently"),
        ({"chosen": "Hello", "rejected": "Hello there"}, "no prompt: chosen and rejected begin differently"),
        ({"chosen": f"{HELLO} a", "rejected": f"{HELLO} "}, "rejected: empty"),
        ({"prompt": "Hi", "instruction": "Hi", **TEXTS}, "prompt and instruction: two prompts; expected one of them"),
        # Columns that do not go together.
        ({"prompt": "Hi", "system": "Be kind", **TEXTS}, "system: given beside chosen and rejected that are strings"),
        ({"prompt": "Hi", "system": 3, **TEXTS}, "system: a number"),
        (
            {"prompt": [SYSTEM, USER], "system": "Be brief", **ANSWERS},
            "system: another one than the system message of the prompt",
        ),
        ({"prompt": "Hi", "input": "Ann", **TEXTS}, "input: given without instruction"),
        ({"instruction": [USER], "input": "Ann", **TEXTS}, "input: given beside an instruction that is a list"),
        ({"instruction": "Hi", "input": 3, **TEXTS}, "input: a number"),
        # What Python prints is no JSON, and a key that is there twice is lost.
        ({"prompt": "Hi", "chosen": str([ANSWER]), "rejected": "b"}, "chosen: a string that is no JSON list"),
        (
            {"chosen": '[{"role": "user", "role": "assistant", "content": "a"}]', "rejected": json.dumps([OTHER])},
            "chosen: an object has the key 'role' twice",
        ),
    ],
)
def test_a_pair_that_cannot_be_used_is_a_problem_of_its_field(row, problem):
    assert sample_of(row).startswith(problem) or f" {problem}" in sample_of(row)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"completion": "Hello", "label": True}, "completion: no prompt: it has no turn 'Assistant:'"),
        ({"completion": [ANSWER], "label": True}, "completion: no prompt before the answer"),
        ({"completion": [USER], "label": True}, "completion: no assistant turn"),
        ({"prompt": "Hi", "completion": None, "label": True}, "completion: null"),
        ({"prompt": [USER], "completion": [MORE, ANSWER], "label": True}, "completion[0]: a message of the user"),
    ],
)
def test_a_rated_answer_that_cannot_be_used_is_a_problem_of_its_field(row, problem):
    assert sample_of(row, "rated").startswith(problem)


@pytest.mark.parametrize("missing", ["prompt", "chosen", "rejected"])
def test_a_row_without_a_half_or_without_its_prompt_is_a_problem(missing):
    row = {"prompt": "Hi", **TEXTS}
    fields = choose_fields(list(row), {}, "train.jsonl", wanted="pairs")
    (problem,) = to_sample({name: value for name, value in row.items() if name != missing}, fields)
    assert problem.found.startswith(f"no {missing!r} (it has ") and "in every row" in problem.expected
