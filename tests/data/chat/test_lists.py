"""Lists in a cell of a table: a JSON string is the list that it holds, and any other string is said to be none."""

import json

import pytest
from data_helpers import ANSWER, SYSTEM, USER

from kit.data.chat.lists import (
    are_messages,
    are_printed_messages,
    explain_string,
    list_of,
    listed,
    system_message,
)
from kit.errors import Problem, Problems

CELL = json.dumps([USER, ANSWER])


@pytest.mark.parametrize("value", [CELL, f" \n{CELL}", "[]", "[1, 2]"])
def test_a_json_list_in_a_string_is_the_list(value):
    assert listed(value) == json.loads(value)


@pytest.mark.parametrize("value", [[USER], None, 3, "Hi", '{"role": "user"}', "[Hi]", "[1, 2", "[" * 100_000, ""])
def test_any_other_value_is_left_as_it_is(value):
    assert listed(value) is value
    problems = Problems()
    assert list_of("messages", value, problems) is value and not problems


def test_a_key_that_is_there_twice_is_a_problem_of_its_field():
    problems = Problems()
    assert list_of("messages", '[{"role": "user", "content": "a", "content": "b"}]', problems)
    assert [problem.where for problem in problems] == ["messages"] and "'content' twice" in problems[0].found


def test_messages_are_lists_of_objects_with_a_role_in_strings():
    assert are_messages(CELL) and are_messages(CELL, CELL)
    for value in ("[]", "[1]", '[{"name": "Ann"}]', "Hi", [USER], None):
        assert not are_messages(value) and not are_messages(CELL, value)


def test_what_python_prints_is_recognised_and_the_fix_says_how_to_write_it():
    assert are_printed_messages(str([USER])) and not are_printed_messages(CELL)
    problems = Problems([Problem("a", "first"), Problem("messages", "a string", "a list of messages")])
    explain_string(str([USER]), problems)
    assert problems[0] == Problem("a", "first")
    assert problems[1].found == "a string that is no JSON list" and "json.dumps(...)" in problems[1].fix
    explain_string("Hi", problems)
    assert problems[1].found == "a string that is no JSON list" and not problems[1].fix
    explain_string([USER], problems)  # a list, so something else is wrong
    explain_string("Hi", none := Problems())
    assert not none


@pytest.mark.parametrize("values", [{}, {"system": None}, {"system": ""}, {"system": " \n"}])
def test_a_blank_column_of_system_prompts_is_no_message(values):
    assert system_message(values, problems := Problems()) == [] and not problems


def test_a_column_of_system_prompts_is_a_message_or_a_problem():
    assert system_message({"system": SYSTEM["content"]}, Problems()) == [SYSTEM]
    for value in (3, ["Be kind"], "\ud800"):
        system_message({"system": value}, problems := Problems())
        assert [problem.where for problem in problems] == ["system"]
