"""Say what makes the metrics of answers doubtful. Imports no torch, since reports say it too.

Promises: each line gives the figures it follows from.
"""

from collections.abc import Iterable, Mapping
from typing import Any

MANY_UNENDED = 0.1  # share of the answers


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


def unasked(row: Mapping[str, Any]) -> list[str]:
    """Return a line if samples ask nothing; else nothing. ``row`` is that of ``unended``."""
    if not (number := row.get("num_unasked_samples", 0)):
        return []
    return [f"{number} samples ask nothing (train_on all, or an empty prompt): no answers are generated"]
