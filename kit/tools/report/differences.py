"""What differs between two answers, token by token."""

from difflib import SequenceMatcher
from itertools import pairwise

import numpy as np


def differing(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens of each answer are not in the other one at their place, bool [T1] and bool [T2].

    Tokens that two different texts happen to have in common, such as a comma, count as different: a run of tokens
    counts as the same only if it is longer than what differs on one of its sides.

    Args:
        first: int [T1], the ids of an answer.
        second: int [T2].
    """
    differ = np.ones(len(first), bool), np.ones(len(second), bool)
    # Without autojunk: it passes over tokens that are frequent in an answer, which most tokens of code or digits are.
    blocks = SequenceMatcher(None, first.tolist(), second.tolist(), autojunk=False).get_matching_blocks()
    starts = [(block.a, block.b) for block in blocks]  # the last block is empty and lies behind both answers
    ends = [(0, 0), *((block.a + block.size, block.b + block.size) for block in blocks)]
    gaps = [max(a - end_a, b - end_b) for (a, b), (end_a, end_b) in zip(starts, ends, strict=False)]
    for block, gaps_beside in zip(blocks, pairwise(gaps), strict=False):
        if block.size > min(gaps_beside):
            differ[0][block.a : block.a + block.size] = False
            differ[1][block.b : block.b + block.size] = False
    return differ
