"""Warnings about generation metrics: truncated answers, samples without a prompt.

Promises: each line gives its figures. Imports no torch, since reports have the lines too.
"""

from collections.abc import Iterable, Mapping
from typing import Any

MANY_TRUNCATED = 0.1  # fraction of the answers


def truncated_answers(row: Mapping[str, Any], max_new_tokens: int, method: str, stops: Iterable[str]) -> list[str]:
    """Return a line if many generated answers were cut off at ``max_new_tokens``; else nothing.

    Args:
        row: of an evaluation, in ``metrics.jsonl``.
        max_new_tokens: of the run, like ``method``.
        stops: the tokens that end answers of the data.
    """
    number, num_answers = row.get("num_truncated_answers", 0), row.get("num_answers", 0)
    if not number or number < MANY_TRUNCATED * num_answers:
        return []
    text = f"{number} of {num_answers} answers did not end within max_new_tokens {max_new_tokens}"
    names = ",".join(stops)
    untrained = f"; or the stop token was never trained: --trainable_tokens '{names}'"
    return [f"{text}: train longer, or raise max_new_tokens{untrained if names and method != 'full' else ''}"]


def missing_prompts(row: Mapping[str, Any]) -> list[str]:
    """Return a line if samples have no prompt; else nothing. ``row``: as for ``truncated_answers``."""
    if not (number := row.get("num_samples_without_prompt", 0)):
        return []
    return [f"{number} samples have no prompt (train_on all, or an empty one): no answers are generated for them"]
