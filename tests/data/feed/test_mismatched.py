"""Mismatched prompt-completion pairs: each prompt and answer once, the same on every topology and in every epoch."""

import numpy as np
import pytest
from data_helpers import open_all, rated_answers, write

from kit.data.feed.mismatched import Mismatched
from kit.data.kinds.unpaired_preference import PROMPT_LENGTH


def parts(samples, i):
    """The prompt and the answer of sample ``i``, as lists of ids."""
    ids, num = samples[i][0].tolist(), int(samples.values[i, PROMPT_LENGTH])
    return ids[:num], ids[num:]


@pytest.mark.parametrize("num", [2, 3, 20])
def test_each_prompt_gets_the_answer_to_another_and_each_answer_is_used_once(num, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *rated_answers(num))
    train = open_all(tokenizer, objective="kto", max_length=128).train
    mismatched = Mismatched(train, seed=1, max_length=128)
    assert sorted(mismatched.partners.tolist()) == list(range(num))
    assert not (mismatched.partners == np.arange(num)).any()
    for i in range(num):
        ((ids, weights),) = mismatched.sequences(i)
        (prompt, _), (_, answer) = parts(train, i), parts(train, int(mismatched.partners[i]))
        assert ids.tolist() == prompt + answer and len(ids) == mismatched.lengths[i] == mismatched.row_lengths[i]
        assert weights.tolist() == [0] * len(prompt) + [1] * len(answer)
