"""What differs between two answers is marked, and what they merely happen to share is not taken for the same."""

import random

import numpy as np

from kit.tools.report.differences import differing


def marked(first, second):
    """Both answers, words as tokens, with what differs in brackets."""
    words = [text.split() for text in (first, second)]
    ids = {word: i for i, word in enumerate(sorted({*words[0], *words[1]}))}
    masks = differing(*(np.array([ids[word] for word in each], int) for each in words))
    texts = (
        [f"({w})" if differs else w for w, differs in zip(each, mask, strict=True)]
        for each, mask in zip(words, masks, strict=True)
    )
    return [" ".join(text) for text in texts]


def test_what_is_not_in_the_other_answer_is_marked():
    cases = [
        ("a b c d", "a b c d", ["a b c d", "a b c d"]),
        ("a b c d", "a x c d", ["a (b) c d", "a (x) c d"]),
        ("a b c d", "a b d", ["a b (c) d", "a b d"]),
        ("a b", "a b c d", ["a b", "a b (c) (d)"]),
        ("a b", "c d", ["(a) (b)", "(c) (d)"]),
        ("", "a", ["", "(a)"]),
        # A comma in common does not make two sentences alike, and their common end is an end.
        ("one two , three four .", "five six , seven eight .", None),
    ]
    for first, second, expected in cases:
        if expected is None:
            expected = ["(one) (two) (,) (three) (four) .", "(five) (six) (,) (seven) (eight) ."]
        assert marked(first, second) == expected, (first, second, expected)


def test_what_is_not_marked_is_the_same_in_both():
    generator = random.Random(0)
    for _ in range(200):
        first, second = (np.array(generator.choices(range(4), k=generator.randrange(12)), int) for _ in range(2))
        masks = differing(first, second)
        assert first[~masks[0]].tolist() == second[~masks[1]].tolist()


def test_tokens_that_are_frequent_in_a_long_answer_are_compared_too():
    digits = np.random.default_rng(0).integers(0, 10, 400)
    masks = differing(digits, np.concatenate([digits[:150], [99], digits[150:]]))
    assert not masks[0].any() and np.flatnonzero(masks[1]).tolist() == [150]
