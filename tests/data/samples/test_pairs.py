"""Pairs as samples: two sequences with the same prompt, of which exactly the answers are supervised, cut alike."""

import numpy as np
import pytest
from data_helpers import (
    GOLDEN,
    byte_level_tokenizer,
    chat,
    encode,
    marked,
    open_all,
    template_of,
    write,
)

from kit.data.chat.tokens import Encoded
from kit.data.kinds.one_prompt import OnePrompt
from kit.system.errors import UserError

SHAPES = sorted(path.stem for path in GOLDEN.glob("*.txt"))
USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind"}
HELLO, AWAY = {"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "Go away"}
PAIR = {"prompt": [USER], "chosen": [HELLO], "rejected": [AWAY]}


def opened(tmp_path, tokenizer, *rows, objective="dpo", **changes):
    write(tmp_path / "train.jsonl", *rows)
    return open_all(tokenizer, objective=objective, **{"chat_template": "chatml", "max_length": 256, **changes})


def halves(samples, i=0):
    """The sequences of a sample, as ``Encoded``."""
    return [Encoded(ids.tolist(), weights.tolist()) for ids, weights in samples.sequences(i)]


def problem(tmp_path, tokenizer, *rows, **changes):
    with pytest.raises(UserError) as caught:
        opened(tmp_path, tokenizer, *rows, **changes)
    return str(caught.value)


# The mask, and the prompt


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "deepseek_r1"])  # that one asks for thoughts
@pytest.mark.parametrize("turns", [("Hi",), ("Hi", "Hello", "Bye")])
def test_both_halves_are_what_a_conversation_becomes_and_have_the_same_prompt(shape, turns, tmp_path):
    tokenizer = byte_level_tokenizer(bos_token="<bos>")
    (tmp_path / "template.jinja").write_text(template_of(shape, tokenizer))
    prompt = chat(*turns)["messages"]
    row = {"prompt": prompt, "chosen": [HELLO], "rejected": [AWAY]}
    data = opened(tmp_path, tokenizer, row, chat_template=str(tmp_path / "template.jinja"))
    for half, answer in zip(halves(data.train), (HELLO, AWAY), strict=True):
        (alone,) = encode({"prompt": prompt, "completion": [answer]}, tokenizer, template_of(shape, tokenizer))
        assert (half.input_ids, half.weights) == (alone.input_ids, alone.weights)
        # Supervised is one run of tokens, the answer with what ends it.
        supervised = np.flatnonzero(half.weights)
        assert supervised.tolist() == list(range(supervised[0], supervised[-1] + 1))
        assert answer["content"] in tokenizer.decode(half.input_ids[supervised[0] : supervised[-1]])
    assert data.train.answer_spans[0, 0] == supervised[0]
    assert data.train.sequence_lengths.tolist() == [[len(half.input_ids) for half in halves(data.train)]]


def test_turns_of_weight_zero_that_both_have_are_read_and_not_compared(tmp_path, tokenizer):
    first = HELLO | {"train": False}
    row = {"prompt": [USER], "chosen": [first, USER, HELLO], "rejected": [first, USER, AWAY]}
    train = opened(tmp_path, tokenizer, row).train
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert marked(halves(train)[0], tokenizer) == f"{asked}Hello<|im_end|>\n{asked}[[Hello<|im_end|>]]\n"
    assert train.answer_spans[0, 0] == len(tokenizer(f"{asked}Hello<|im_end|>\n{asked}").input_ids)
    other = {**row, "rejected": [AWAY | {"train": False}, USER, AWAY]}
    assert "rejected: the prompt before it has other tokens than" in problem(tmp_path, tokenizer, other)


# What is refused, row by row


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"rejected": [HELLO]}, " rejected: the same tokens as chosen; expected another answer"),
        ({"chosen": [HELLO | {"weight": 0}]}, " chosen: nothing of it is supervised"),
    ],
)
def test_a_pair_that_cannot_be_compared_is_refused(changes, reported, tmp_path, tokenizer):
    assert f"train.jsonl:2{reported}" in problem(tmp_path, tokenizer, PAIR, {**PAIR, **changes})


def test_of_three_answers_each_follows_the_same_prompt_and_differs():
    class Ranked(OnePrompt):
        answers = ("first", "second", "third")

    def joined(*answers):
        return Ranked().join({}, [[Encoded([1, 2, *ids], [0.0, 0.0, *[1.0] * len(ids)])] for ids in answers])

    (sequences,) = joined([3], [4, 5], [6])
    assert [each.input_ids for each in sequences] == [[1, 2, 3], [1, 2, 4, 5], [1, 2, 6]]
    problem = joined([3], [4], [4])
    assert (problem.where, problem.found) == ("third", "the same tokens as second")


# Cutting


@pytest.mark.parametrize("with_bos", [False, True])
def test_a_long_prompt_loses_its_start_the_same_in_both_halves(with_bos, tmp_path):
    tokenizer = byte_level_tokenizer(**({"bos_token": "<bos>"} if with_bos else {}))
    row = {"prompt": "a b c d e f g h ", "chosen": "Hello", "rejected": "Hello Hello Hello"}
    whole = halves(opened(tmp_path, tokenizer, row, chat_template=None).train)
    first, num_over = (1 if with_bos else 0), 5
    settings = {"chat_template": None, "max_length": len(whole[1].input_ids) - num_over}
    for strategy in ("truncate", "keep_end"):
        data = opened(tmp_path, tokenizer, row, **settings, excess_length_strategy=strategy)
        for cut, half in zip(halves(data.train), whole, strict=True):
            assert cut.input_ids == half.input_ids[:first] + half.input_ids[first + num_over :]
            assert cut.weights == half.weights[:first] + half.weights[first + num_over :]
        assert f"train.jsonl: 1 of 1 samples truncated at {settings['max_length']} tokens" in data.notes
        remark = "the start of the prompt was truncated, so that no answer is"
        assert f"train.jsonl: 1 of 1 samples: {remark}" in data.notes


def test_a_pair_whose_answer_leaves_no_room_for_a_prompt_is_left_out_whole(tmp_path, tokenizer):
    rows = [
        {"prompt": "a b ", "chosen": "c", "rejected": "d"},
        {"prompt": "a b ", "chosen": "c", "rejected": "d " * 30},  # of the longer half only
        {"prompt": "a b ", "chosen": "c " * 30, "rejected": "d"},
    ]
    data = opened(tmp_path, tokenizer, *rows, chat_template=None, max_length=16)
    assert [data.train.origin(i) for i in range(len(data.train))] == ["train.jsonl:1"]
    assert "train.jsonl: 2 of 3 samples left out: longer than 16 tokens" in data.notes
