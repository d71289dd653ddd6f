"""Rows for a head in the place of words: texts that are compared, have labels, or belong to each other. Pure.

A text alone, or with a second one, becomes what the model's own tokenizer makes of it (``plain``): so what is trained
on is what ``pipeline`` of transformers and sentence-transformers give the model.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from kit.data.chat.messages import are_messages, check_text, parsed, read_messages
from kit.data.chat.preferences import answers_to_one_prompt
from kit.system.errors import Problem, UserError

_ANSWERS = ("chosen", "rejected")
MULTI_HOT = "of a multi-hot list, write the places of its ones, from 0: [1, 2] for [0, 1, 1]"
_NO_LIST = re.compile(r"""\s*\[([^\W\d][^,'"\[\]]*\]|[^'"\[\]]*\]\s*\S)""")  # [PER], [1] and more, [a, b] and more
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
        texts = {"positive": values["positive"], **_negatives(values)}
        if len(texts) == 1:
            raise UserError(Problem("negative", "none", "at least one"))
        return {"plain": [[query, check_text(name, text)] for name, text in texts.items()], **more}
    answers = [values[name] for name in _ANSWERS]
    has_prompt = "prompt" in values or "instruction" in values
    if not has_prompt and all(isinstance(each, str) and not are_messages(each) for each in answers):
        return {"plain": [[check_text(name, each)] for name, each in zip(_ANSWERS, answers, strict=True)], **more}
    return answers_to_one_prompt(values, _ANSWERS) | more


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
    value = _as_list("label", value)
    if not isinstance(value, list):
        return [_name("label", value)], False
    names = [_name(f"label[{i}]", each) for i, each in enumerate(value)]
    if len(set(names)) < len(names) or any(isinstance(each, bool | float) for each in value):
        expected = "the names or the numbers of its labels, each once"
        raise UserError(Problem("label", repr(value)[:80], expected, MULTI_HOT))
    return names, True


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
    texts = {"anchor": values["anchor"], "positive": values["positive"], **_negatives(values)}
    return {"plain": [[check_text(name, text)] for name, text in texts.items()]}


def _negatives(values: Mapping[str, Any]) -> dict[str, Any]:
    """The texts in the column ``negative``, each with its name: one, a list of them, or none."""
    given = _as_list("negative", values.get("negative"))
    if isinstance(given, list):
        return {f"negative[{i}]": each for i, each in enumerate(given)}
    return {} if given is None else {"negative": given}


def _as_list(name: str, value: Any) -> Any:
    """A value, as a list if it is a JSON string of one. Raises ``UserError`` for a string that only looks like one."""
    is_list = isinstance(value, str) and value.lstrip().startswith("[") and not _NO_LIST.match(value)
    return parsed(name, value) if is_list else value
