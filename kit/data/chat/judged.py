"""Rows for a head in the place of words: texts that are compared, have labels, or belong to each other. Pure.

A text alone, or with a second one, becomes what the model's own tokenizer makes of it (``plain``): so what is trained
on is what ``pipeline`` of transformers and sentence-transformers give the model.
"""

import math
from collections.abc import Mapping
from typing import Any

from kit.data.chat.messages import are_messages, check_text, parsed, read_messages
from kit.data.chat.preferences import answers_to_one_prompt
from kit.errors import Problem, UserError

Sample = dict[str, Any]


def compared(values: Mapping[str, Any]) -> Sample:
    """The better and the worse answer to a prompt, or two texts without one; optionally how far they are apart."""
    margin = values.get("margin")
    try:
        number = 0.0 if margin is None else float(margin)  # also of a cell of a table
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(margin, bool) or not math.isfinite(number):
        raise UserError(Problem("margin", repr(margin)[:80], "a number"))
    more = {"values": [number]}
    if "query" in values:
        query = check_text("query", values["query"])
        texts = [[query, check_text(name, values[name])] for name in ("positive", "negative")]
        return {"plain": texts, **more}
    answers = [values[name] for name in ("chosen", "rejected")]
    has_prompt = "prompt" in values or "instruction" in values
    if not has_prompt and all(isinstance(each, str) and not are_messages(each) for each in answers):
        texts = [[check_text(name, each)] for name, each in zip(("chosen", "rejected"), answers, strict=True)]
        return {"plain": texts, **more}
    return answers_to_one_prompt(values, ("chosen", "rejected")) | more


def labelled(values: Mapping[str, Any]) -> Sample:
    """A text, two texts, or a conversation, with the names of its labels."""
    names, _ = label_names(values["label"])
    if "messages" in values:
        messages = read_messages("messages", values["messages"], needs_answer=False)
        return {"prompt": messages, "completion": [], "label": names}
    columns = [name for name in ("text", "query", "document") if name in values]
    return {"plain": [[check_text(name, values[name]) for name in columns]], "label": names}


def label_names(value: Any) -> tuple[list[str], bool]:
    """Return the names of the labels in a column, and whether it may hold several. Raises ``UserError``."""
    value = parsed("label", value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if isinstance(value, list):
        return list(dict.fromkeys(_name(f"label[{i}]", each) for i, each in enumerate(value))), True
    return [_name("label", value)], False


def _name(where: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    if isinstance(value, float):
        raise UserError(Problem(where, repr(value), "the name or the number of a label; no amount is learned"))
    return check_text(where, value).strip()


def contrasts(values: Mapping[str, Any]) -> Sample:
    """A text, one that belongs to it, and any number of others that do not: each is embedded alone."""
    negatives = values.get("negative")
    if isinstance(negatives, str) and negatives.lstrip().startswith("["):
        negatives = parsed("negative", negatives)
    negatives = negatives if isinstance(negatives, list) else [] if negatives is None else [negatives]
    texts = {"anchor": values["anchor"], "positive": values["positive"]}
    texts |= {f"negative[{i}]": each for i, each in enumerate(negatives)}
    return {"plain": [[check_text(name, text)] for name, text in texts.items()]}
