"""Say what makes the exact match of an evaluation doubtful. Imports no torch, since reports say it too.

Promises: each line gives the figures it follows from.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# Shares of the answers: of those that did not end; of different texts among those that are expected.
MANY_UNENDED, FEW_TEXTS = 0.1, 0.1


def unended(row: Mapping[str, Any], max_new_tokens: int, method: str, stops: Iterable[str]) -> list[str]:
    """Return a line if many generated answers did not end within ``max_new_tokens``; else nothing.

    Args:
        row: of an evaluation, in ``metrics.jsonl``.
        max_new_tokens: of the run, as ``method``.
        stops: the tokens that end answers of the data.
    """
    number, num_answers = row.get("num_unended_answers", 0), row.get("num_answers", 0)
    if not number or number < MANY_UNENDED * num_answers:
        return []
    text = f"{number} of {num_answers} answers did not end within max_new_tokens {max_new_tokens}"
    names = ",".join(stops)
    untrained = f"; or the stop token was never trained: --trainable_tokens '{names}'"
    return [f"{text}: train longer, or raise max_new_tokens{untrained if names and method != 'full' else ''}"]


def few_texts(row: Mapping[str, Any]) -> list[str]:
    """Return a line if the expected answers are few different texts, and one if samples ask nothing.

    ``row`` is that of ``unended``.
    """
    lines = []
    if num_unasked := row.get("num_unasked_samples", 0):
        lines = [f"{num_unasked} samples ask nothing (train_on all, or an empty prompt): no answers are generated"]
    num_answers, num_texts = row.get("num_answers", 0), row.get("num_expected_texts", 0)
    if num_answers >= 2 and 0 < num_texts <= max(1, FEW_TEXTS * num_answers):
        share = row.get("num_most_frequent_text", 0) / num_answers
        found = f"the {num_answers} expected answers are {num_texts} different texts"
        lines.append(f"{found}: always giving the most frequent would match {share:.1%}")
    return lines
