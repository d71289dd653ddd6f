"""Finds what a row holds besides the fields of its format. Pure.

Promises:

- Columns and keys of messages that nothing reads are counted, so that they can be shown.
- One that would change what is learned, such as ``images``, is a problem, unless the user has said to ignore it.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kit.data.chat.formats import IGNORE, listed
from kit.data.chat.messages import REASONING
from kit.errors import Problem

# The keys of a message that ``kit.data.chat.messages`` reads.
MESSAGE_KEYS = frozenset(
    ("role content from value name tool_calls tool_call_id function_call train weight " + " ".join(REASONING)).split()
)
MEDIA = "image images video videos audio audios pixel_values".split()
ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")
MASKS = "attention_mask loss_mask completion_mask assistant_masks".split()
# Columns in which a value may change what is learned, see ``_harm_of_column``.
WATCHED = (
    *(*MEDIA, *ROW_WEIGHTS, *MASKS, "train", "history", "system", "system_prompt", "tools", "functions"),
    *("label", "kto_tag", "role", "parent_id", "position_ids", "labels"),
)
# Keys of a message that say how much of it is learned, but that the kit does not read.
LEARNED_KEYS = {"training": "train", "loss": "train", "loss_weight": "weight", "loss_scale": "weight"}
DETAILS = ("train_detail", "training_detail")


def read_keys(ignored: Collection[str]) -> list[str]:
    """Return those of ``ignored`` that are keys of messages that the kit would read: ``messages.thinking``."""
    return sorted(name for name in ignored if name.partition(".")[2] in MESSAGE_KEYS)


def without_keys(row: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return ``row`` without the keys of messages in ``names``, as ``read_keys`` returned them."""
    for name in names:
        column, _, key = name.partition(".")
        messages = listed(row.get(column))
        if isinstance(messages, list):
            less = [{k: v for k, v in m.items() if k != key} if isinstance(m, dict) else m for m in messages]
            row = {**row, column: less}
    return row


class Unused:
    """What the rows of one data set hold besides the fields of its format."""

    def __init__(self, fields: Mapping[str, str], ignored: Collection[str]) -> None:
        """
        Args:
            fields: the columns that are read: our field to their column.
            ignored: columns, and keys such as ``messages.loss_weight``, that the user wants to be ignored.
        """
        self._format, self._fields, self._ignored = next(iter(fields)), fields, frozenset(ignored)
        self._read = frozenset(fields.values())
        self._lists = [fields[ours] for ours in ("messages", "conversations", "prompt", "completion") if ours in fields]
        self.counts: Counter[str] = Counter()  # rows in which a column or key has a value

    def check(self, row: Mapping[str, Any]) -> list[Problem]:
        """Count what is not used of a row. Returns a problem for each part that would change what is learned."""
        problems = []
        if extra := row.keys() - self._read:
            for column in sorted(extra):
                if not _is_empty(row[column]):
                    self.counts[column] += 1
                    if column in WATCHED and column not in self._ignored:
                        problems += self._problem(column, *self._harm_of_column(column, row[column], row))
        keys: dict[str, Problem | None] = {}
        for column in self._lists:
            for name, found, fix in _keys(column, row.get(column)):
                problem = self._problem(name, found, fix) if name not in self._ignored else []
                keys[name] = keys.get(name) or next(iter(problem), None)
        self.counts.update(keys.keys())
        return problems + [problem for problem in keys.values() if problem]

    def _problem(self, name: str, found: str, fix: str = "") -> list[Problem]:
        ways = [fix] if fix else []
        ways.append(f"to ignore it, add {name}={IGNORE} to --dataset_columns")
        return [Problem(name, found, fix="; or ".join(ways))] if found else []

    def _harm_of_column(self, column: str, value: Any, row: Mapping[str, Any]) -> tuple[str, str]:
        """What would be learned wrongly if ``value`` were ignored, and a way to use it; empty if nothing."""
        is_chat = self._format not in ("text", "input_ids")
        if column in MEDIA:
            return "media, and only text is learned from", ""
        if column == "train" and _is_false(value):
            return "false: a row that is not to be learned from", "remove such rows"
        if column in ROW_WEIGHTS and not _is_one(value):
            return f"a weight of the row ({_short(value)})", "write it as the weight of its assistant messages"
        if column in ("label", "kto_tag") and is_chat and _is_false(value, zero=True):
            return f"{_short(value)}: an answer marked as bad would be learned", "remove such rows"
        if column == "history" and is_chat:
            return "earlier turns, which only instruction and output can have", self._as_instruction("history")
        if column in ("system", "system_prompt") and is_chat:
            renamed = "" if column == "system" else ",system_prompt=system"
            if self._format in ("instruction", "conversations"):
                return "a system prompt", "--dataset_columns " + renamed[1:]
            if self._format == "messages":
                theirs = self._fields["messages"]
                return "a system prompt beside messages", f"--dataset_columns {theirs}=conversations{renamed}"
            return "a system prompt beside prompt and completion", self._as_instruction(column)
        if column in ("tools", "functions") and is_chat:
            is_alpaca = self._format == "instruction"
            return "tools of the assistant", "" if is_alpaca else f"--dataset_columns {column}=tools"
        if column in ("role", "parent_id") and self._format == "text":
            return "a row for each message of a conversation, read as plain texts", "join them to lists of messages"
        if self._format == "input_ids":
            return _harm_to_ids(column, value, row.get(self._fields["input_ids"]))
        return "", ""

    def _as_instruction(self, column: str) -> str:
        """The flag with which the same columns are read as Alpaca's; empty if they cannot be."""
        if self._format != "prompt" or column not in ("history", "system", "system_prompt"):
            return ""
        more = ",system_prompt=system" if column == "system_prompt" else ""
        prompt, completion = self._fields["prompt"], self._fields["completion"]
        return f"--dataset_columns {prompt}=instruction,{completion}=output{more} reads a chat with it"


def _harm_to_ids(column: str, value: Any, ids: Any) -> tuple[str, str]:
    if column == "labels":
        return "given here, and not in the first row", "give labels in every row, or in none"
    if column in MASKS and isinstance(value, list) and not all(value):
        return "masks tokens, which would be learned", "give labels, -100 where nothing is learned; leave padding out"
    if column == "position_ids" and isinstance(ids, list) and value != list(range(len(ids))):
        return "not 0, 1, 2, ...: packed samples would see each other", "give each sample a row; --packing packs them"
    return "", ""


def _keys(column: str, messages: Any) -> Iterator[tuple[str, str, str]]:
    """The keys of messages that are not used: name, what would be learned wrongly (or empty), and a way to use it."""
    if isinstance(messages, str):
        messages = listed(messages)
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            continue
        for key in sorted(message.keys() - MESSAGE_KEYS) if len(message) > 2 else ():
            if not _is_empty(message[key]):
                is_answer = message.get("role", message.get("from")) not in ("system", "user", "human", "tool")
                yield f"{column}.{key}", *_harm_of_key(key, message[key], is_answer)
        parts = message.get("content", message.get("value"))
        for part in parts if isinstance(parts, list) else ():
            for key in sorted(part.keys() - {"type", "text"}) if isinstance(part, dict) else ():
                if not _is_empty(part[key]):
                    is_learned = key in DETAILS or key in LEARNED_KEYS or key in ("train", "weight")
                    harm = "which part is learned, and only whole messages can be chosen" if is_learned else ""
                    yield f"{column}.content.{key}", harm if not _is_one(part[key]) else "", ""


def _harm_of_key(key: str, value: Any, is_answer: bool) -> tuple[str, str]:
    if key in DETAILS:
        return "which part is learned, and only whole messages can be chosen", ""
    if key in LEARNED_KEYS and (not _is_one(value) if is_answer else bool(value)):
        return (
            f"{_short(value)}: how much is learned from a message",
            f"call it {LEARNED_KEYS[key]}, on assistant turns",
        )
    if key in ("label", "kto_tag") and _is_false(value):
        return f"{_short(value)}: an answer marked as bad would be learned", "remove such rows"
    return ("media, and only text is learned from", "") if key in MEDIA else ("", "")


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _is_false(value: Any, zero: bool = False) -> bool:
    words = ("false", "0") if zero else ("false",)
    return value is False or (zero and value == 0) or (isinstance(value, str) and value.strip().lower() in words)


def _is_one(value: Any) -> bool:
    return value == 1 or (isinstance(value, str) and value.strip().lower() in ("1", "1.0", "true"))


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 20 else text[:20] + "..."
