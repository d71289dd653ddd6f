"""Warnings about generation metrics: truncated answers, samples without a prompt.

Promises: each line gives its figures. Imports no torch, since reports have the lines too.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.config.recipe import Recipe

MANY_TRUNCATED = 0.1  # fraction of the answers


def limits_of(recipe: "Recipe") -> list[str]:
    """Return the settings that cut answers off."""
    return ["max_new_tokens", *["max_turns", "max_length"] * recipe.has_tools]


def truncated_answers(row: Mapping[str, Any], recipe: "Recipe", stops: Iterable[str]) -> list[str]:
    """Return a line if many generated answers were cut off; else nothing.

    Args:
        row: of an evaluation, in ``metrics.jsonl``.
        stops: the tokens that end answers of the data.
    """
    number, num_answers = row.get("num_truncated_answers", 0), row.get("num_answers", 0)
    if not number or number < MANY_TRUNCATED * num_answers:
        return []
    keys = limits_of(recipe)
    limits = ", ".join(f"{key} {getattr(recipe, key)}" for key in keys)
    text = f"{number} of {num_answers} answers did not end within {limits}"
    names = ",".join(stops)
    untrained = f"; or the stop token was never trained: --trainable_tokens '{names}'"
    return [
        f"{text}: train longer, or raise {' or '.join(keys)}{untrained if names and recipe.method != 'full' else ''}"
    ]


def missing_prompts(row: Mapping[str, Any]) -> list[str]:
    """Return a line if samples have no prompt; else nothing. ``row``: as for ``truncated_answers``."""
    if not (number := row.get("num_samples_without_prompt", 0)):
        return []
    return [f"{number} samples have no prompt (train_on all, or an empty one): no answers are generated for them"]
