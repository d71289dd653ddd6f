"""Answers that did not end, and a match that a constant answer would reach, are reported with their figures."""

import pytest

from kit.run.answers import few_texts, unended


def test_many_answers_without_an_end_are_reported_with_a_fix(recipe):
    row = {"num_answers": 35, "num_unended_answers": 30}
    (line,) = unended(row, recipe(method="lora", max_new_tokens=128), ["<|im_end|>"])
    assert line.startswith("30 of 35 answers did not end within max_new_tokens 128")
    assert "; --trainable_tokens '<|im_end|>'" in line
    (line,) = unended(row, recipe(method="lora", adapter_type="oft"), ["<|im_end|>"])
    assert "; --adapter_type lora --trainable_tokens '<|im_end|>'" in line
    (line,) = unended(row, recipe(method="full"), ["<|im_end|>"])
    assert "30 of 35" in line and "trainable_tokens" not in line


@pytest.mark.parametrize("row", [{}, {"num_answers": 35, "num_unended_answers": 0}])
def test_of_answers_that_ended_nothing_is_reported(row, recipe):
    assert unended(row, recipe(), ["<|im_end|>"]) == [] and few_texts(row) == []
    assert unended({"num_answers": 35, "num_unended_answers": 2}, recipe(), []) == []


def test_few_expected_texts_are_reported_with_what_a_constant_answer_would_reach():
    (line,) = few_texts({"num_answers": 35, "num_expected_texts": 2, "num_most_frequent_text": 21})
    assert "the 35 expected answers are 2 different texts" in line and "60.0%" in line
    assert few_texts({"num_answers": 35, "num_expected_texts": 9, "num_most_frequent_text": 9}) == []
    assert few_texts({"num_answers": 1, "num_expected_texts": 1, "num_most_frequent_text": 1}) == []
