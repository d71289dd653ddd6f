"""Say what makes the exact match of an evaluation doubtful. Imports no torch, since reports say it too.

Promises: each line gives the figures it follows from.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kit.config.recipe import Recipe
from kit.config.scripts import command_of

# Shares of the answers: of those that did not end; of different texts among those that are expected.
MANY_UNENDED, FEW_TEXTS = 0.1, 0.1


def unended(row: Mapping[str, Any], recipe: Recipe, stops: Iterable[str]) -> list[str]:
    """Return a line if many generated answers did not end within ``max_new_tokens``; else nothing.

    It finds what ``kit.model.untrained`` misses, which needs rows of other untrained tokens to recognise one.

    Args:
        row: of an evaluation, in ``metrics.jsonl``.
        recipe: of the run.
        stops: the tokens that end answers of the data.
    """
    number, num_answers = row.get("num_unended_answers", 0), row.get("num_answers", 0)
    if not number or number < MANY_UNENDED * num_answers:
        return []
    text = f"{number} of {num_answers} answers did not end within max_new_tokens {recipe.max_new_tokens}"
    names = ",".join(stops)
    if recipe.method == "full" or not names:
        return [f"{text}: train longer, or raise max_new_tokens"]
    kind = "" if recipe.adapter_type == "lora" else "--adapter_type lora "
    fix = f"{kind}--trainable_tokens '{names}' trains its row, and servers then need the adapter merged"
    fix += f" ({command_of('export.py')})"
    return [f"{text}: the model may need more steps, or its stop token was never trained; {fix}"]


def few_texts(row: Mapping[str, Any]) -> list[str]:
    """Return a line if the expected answers are few different texts, and one if samples ask nothing.

    ``row`` is that of ``unended``.
    """
    if num_unasked := row.get("num_unasked_samples", 0):
        found = (
            f"{num_unasked} samples ask nothing (train_on all, or an empty prompt): no answers to them are generated"
        )
        return [found, *few_texts({**row, "num_unasked_samples": 0})]
    num_answers, num_texts = row.get("num_answers", 0), row.get("num_expected_texts", 0)
    if num_answers < 2 or not 0 < num_texts <= max(1, FEW_TEXTS * num_answers):
        return []
    share = row.get("num_most_frequent_text", 0) / num_answers
    texts = "one and the same text" if num_texts == 1 else f"{num_texts} different texts"
    return [f"the {num_answers} expected answers are {texts}: always giving the most frequent would match {share:.1%}"]
