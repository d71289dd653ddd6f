"""Truncated answers, and samples without a prompt, are reported with their figures."""

from kit.run.generation_warnings import missing_prompts, truncated_answers


def test_many_answers_without_an_end_are_reported(recipe):
    adapter, full = recipe(max_new_tokens=128), recipe(max_new_tokens=128, method="full")
    row = {"num_answers": 35, "num_truncated_answers": 30}
    (line,) = truncated_answers(row, adapter, ["<|im_end|>"])
    assert line.startswith("30 of 35 answers did not end within max_new_tokens 128")
    assert "--trainable_tokens '<|im_end|>'" in line
    assert "trainable_tokens" not in truncated_answers(row, full, ["<|im_end|>"])[0]
    assert (
        truncated_answers({"num_answers": 35, "num_truncated_answers": 2}, adapter, [])
        == truncated_answers({}, adapter, [])
        == []
    )
    (line,) = truncated_answers(row, recipe(objective="grpo", tools="own.py:add", max_turns=3, max_length=256), [])
    assert "max_new_tokens 128, max_turns 3, max_length 256: train longer, or raise max_new_tokens or max_turns" in line


def test_samples_that_ask_nothing_are_reported():
    (line,) = missing_prompts({"num_samples_without_prompt": 3})
    assert line.startswith("3 samples have no prompt") and missing_prompts({}) == []
