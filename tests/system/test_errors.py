"""All problems are reported at once, each with its place and a fix."""

import pytest

from kit.system.errors import Problem, Problems, UserError, did_you_mean, did_you_mean_path, kind, raise_if
from kit.system.visible import joined


def test_a_problem_has_a_place_found_expected_and_a_fix():
    assert str(Problem("seed", "found 'x'")) == "seed: found 'x'"
    whole = Problem("--seed", "found 'x'", "whole number from 0", "leave it out")
    assert str(whole) == "--seed: found 'x'; expected whole number from 0\n    -> leave it out"


def test_no_text_of_a_problem_forges_a_line_or_moves_the_cursor():
    name = "a\nerror: all is lost\x1b[2J"
    shown = r"a\nerror: all is lost\x1b[2J"
    problem = Problem(name, name, name, name)
    assert str(problem) == f"{shown}: {shown}; expected {shown}\n    -> {shown}"
    assert str(UserError(problem, Problem("b", name))).count("\n") == 3
    assert str(Problem("a", joined(["one", name], "\n    "))) == f"a: one\n    {shown}"


def test_one_problem_is_a_line_and_several_are_a_list():
    one, other = Problem("a", "wrong"), Problem("b", "wrong", fix="fix it")
    assert str(UserError(one)) == "error: a: wrong"
    assert str(UserError(one, other)) == "error: 2 problems\n  - a: wrong\n  - b: wrong\n    -> fix it"


def test_a_problem_that_every_rank_finds_is_reported_once():
    assert str(UserError(*[Problem("a", "wrong")] * 3)) == "error: a: wrong"


def test_problems_that_are_only_counted_are_counted():
    error = UserError(Problem("d.jsonl:1", "wrong"), Problem("d.jsonl", "41 more", num_others=41))
    assert str(error).startswith("error: 42 problems, 1 of them shown\n")


def test_problems_of_several_checks_are_reported_together_and_other_errors_pass():
    problems = Problems()
    with problems.caught():
        raise UserError(Problem("a", "wrong"))
    with problems.caught():
        problems.append(Problem("b", "wrong"))
    with pytest.raises(ValueError), problems.caught():
        raise ValueError
    with pytest.raises(UserError) as caught:
        problems.raise_if_any()
    assert [problem.where for problem in caught.value.problems] == ["a", "b"]
    Problems().raise_if_any()
    raise_if(problem for problem in ())


def test_a_similar_word_gives_a_hint():
    assert did_you_mean("lerning_rate", ["learning_rate", "seed"]) == "did you mean 'learning_rate'?"
    assert did_you_mean("zzz", ["learning_rate", "seed"]) == ""
    assert did_you_mean_path("data/trian.jsonl", ["train.csv", "train.jsonl"]) == "did you mean 'data/train.jsonl'?"
    assert did_you_mean_path("data/nope.jsonl", ["pics.jsonl"]) == ""  # an ending makes no name alike


def test_values_have_the_names_of_json_types():
    cases = [
        (None, "null"),
        (True, "true"),
        (0, "a number"),
        (1.5, "a number"),
        ("", "a string"),
        ([], "a list"),
        ({}, "an object"),
        (b"", "a value of type bytes"),
    ]
    for value, words in cases:
        assert kind(value) == words, (value, words)
