"""Answers that did not end, and a match that a constant answer would reach, are reported with their figures."""

from kit.run.answers import few_texts, unended


def test_many_answers_without_an_end_are_reported():
    row = {"num_answers": 35, "num_unended_answers": 30}
    (line,) = unended(row, 128, "lora", ["<|im_end|>"])
    assert line.startswith("30 of 35 answers did not end within max_new_tokens 128")
    assert "--trainable_tokens '<|im_end|>'" in line
    assert "trainable_tokens" not in unended(row, 128, "full", ["<|im_end|>"])[0]
    assert unended({"num_answers": 35, "num_unended_answers": 2}, 128, "lora", []) == unended({}, 128, "lora", []) == []


def test_few_expected_texts_are_reported_with_what_a_constant_answer_would_reach():
    (line,) = few_texts({"num_answers": 35, "num_expected_texts": 2, "num_most_frequent_text": 21})
    assert "the 35 expected answers are 2 different texts" in line and "60.0%" in line
    for num_answers, num_texts in ((35, 9), (1, 1)):
        row = {"num_answers": num_answers, "num_expected_texts": num_texts, "num_most_frequent_text": num_texts}
        assert few_texts(row) == []
