"""Preference and unpaired preference rows: the prompt is explicit or implicit, and the same for every answer."""

import json

import pytest
from data_helpers import ANSWER, SYSTEM, USER, converted, made

from kit.data.kinds.columns import choose_fields
from kit.data.kinds.kinds import KINDS
from kit.data.kinds.preference import PreferenceRows

OTHER = {"role": "assistant", "content": "Go away"}
MORE, LAST, WORSE_LAST = (
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye now"},
    {"role": "assistant", "content": "At last"},
)
ADD = {"type": "function", "function": {"name": "add"}}
TEXTS = {"chosen": "Hello", "rejected": "Go away"}
ANSWERS = {"chosen": [ANSWER], "rejected": [OTHER]}
IN_MESSAGES = {"prompt": [USER], **ANSWERS}
WHOLE = {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}


def sample_of(row, wanted="preference"):
    """The sample that a row becomes, or what is wrong with it as one string."""
    sample = made(row, kind=KINDS[wanted])
    return "\n".join(map(str, sample)) if isinstance(sample, list) else sample


def said(speaker, value):
    return {"from": speaker, "value": value}


@pytest.mark.parametrize(
    "row",
    [
        IN_MESSAGES,
        WHOLE,
        {"prompt": " Hi\n", **WHOLE},  # as UltraFeedback, where the prompt is there twice
        {"prompt": [USER], **TEXTS},
        {"prompt": "Hi", **ANSWERS},
        {"instruction": "Hi", "input": "", "system": None, **TEXTS},
        {"prompt": [said("human", "Hi")], "chosen": said("gpt", "Hello"), "rejected": said("gpt", "Go away")},
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
    assert sample_of(whole) == sample_of({"prompt": "Hi", **whole}) == expected
    # An answer may have turns of its own, and a prompt that is given is not made longer.
    row = {"chosen": [USER, ANSWER, MORE, LAST], "rejected": [USER, OTHER]}
    assert sample_of(row) == {"prompt": [USER], "chosen": [ANSWER, MORE, LAST], "rejected": [OTHER]}


def test_input_and_system_are_part_of_the_prompt():
    row = {"system": SYSTEM["content"], "instruction": "Hi", "input": "Ann", **TEXTS}
    assert sample_of(row) == {"prompt": [SYSTEM, {"role": "user", "content": "Hi\n\nAnn"}], **ANSWERS}
    # A system message that the prompt has already counts once.
    assert sample_of({"system": SYSTEM["content"], "prompt": [SYSTEM, USER], **ANSWERS})["prompt"] == [SYSTEM, USER]
    more = {"tools": [ADD], "chat_template_kwargs": {"a": 1}}
    assert sample_of({**IN_MESSAGES, **more}) == {**IN_MESSAGES, **more}


def test_texts_stay_texts_also_if_they_repeat_the_prompt_or_are_json():
    for chosen, rejected in (("Hi Ann", "Hi you"), ('["Ann"]', "[]"), ('{"a": 1, "a": 2}', '[{"a": 1, "a": 2}]')):
        row = {"prompt": "Hi", "chosen": chosen, "rejected": rejected}
        assert sample_of(row) == row


def test_a_rated_answer_has_the_prompt_that_is_given_or_stands_before_it():
    rated = {"prompt": [USER], "completion": [ANSWER], "label": True}
    for row in (
        rated,
        {"prompt": "Hi", "completion": [USER, ANSWER], "label": True},
        {"completion": json.dumps([USER, ANSWER]), "label": "true"},
        {"completion": [said("human", "Hi"), said("gpt", "Hello")], "label": "True "},
    ):
        assert sample_of(row, "unpaired_preference") == rated
        assert sample_of({**row, "label": False}, "unpaired_preference") == {**rated, "label": False}
    row = {"completion": [USER, ANSWER, MORE, LAST], "label": False}  # the last answer is rated
    assert sample_of(row, "unpaired_preference") == {
        "prompt": [USER, ANSWER, MORE],
        "completion": [LAST],
        "label": False,
    }
    for label in (0, 1, "yes", None, -1):
        problem = sample_of({**rated, "label": label}, "unpaired_preference")
        assert problem.startswith("label: ") and problem.endswith("; expected true (a good answer) or false")


def test_a_row_that_cannot_be_used_is_a_problem_of_its_field():
    for row, problem in (
        ({"prompt": None, **TEXTS}, "prompt: null; expected a prompt in every row, or in none"),
        (
            {"chosen": [USER, ANSWER], "rejected": [MORE, OTHER]},
            "chosen and rejected: no prompt, or prompts that differ",
        ),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [MORE, OTHER]}, "rejected[0]: a message of the user"),
        ({"prompt": "Hi", "instruction": "Hi", **TEXTS}, "prompt and instruction: two prompts; expected one of them"),
        ({"prompt": [SYSTEM, USER], "system": "Be brief", **ANSWERS}, "system: another one than the system message of"),
        ({"prompt": "Hi", "input": "Ann", **TEXTS}, "input: given without an instruction"),
    ):
        assert sample_of(row).startswith(problem), row
    for row, problem in (
        ({"completion": "Hello", "label": True}, "completion: no prompt; expected"),
        ({"prompt": [USER], "completion": [MORE, ANSWER], "label": True}, "completion[0]: a message of the user"),
    ):
        assert sample_of(row, "unpaired_preference").startswith(problem)
    for missing in ("prompt", "chosen", "rejected"):
        row = {"prompt": "Hi", **TEXTS}
        fields = choose_fields(row, {}, "train.jsonl", kind=PreferenceRows)
        (found,) = converted(
            {name: value for name, value in row.items() if name != missing}, fields, kind=PreferenceRows
        )
        assert found.found.startswith(f"no {missing!r} (it has ") and "in every row" in found.expected
