"""Answers that did not end, and samples without a question, are reported with their figures."""

from kit.run.doubtful_answers import unasked, unended


def test_many_answers_without_an_end_are_reported():
    row = {"num_answers": 35, "num_unended_answers": 30}
    (line,) = unended(row, 128, "lora", ["<|im_end|>"])
    assert line.startswith("30 of 35 answers did not end within max_new_tokens 128")
    assert "--trainable_tokens '<|im_end|>'" in line
    assert "trainable_tokens" not in unended(row, 128, "full", ["<|im_end|>"])[0]
    assert unended({"num_answers": 35, "num_unended_answers": 2}, 128, "lora", []) == unended({}, 128, "lora", []) == []


def test_samples_that_ask_nothing_are_reported():
    (line,) = unasked({"num_unasked_samples": 3})
    assert line.startswith("3 samples ask nothing") and unasked({}) == []
