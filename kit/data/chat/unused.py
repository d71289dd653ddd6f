"""Finds what a row holds besides the fields of its format. Pure.

Promises:

- Columns and keys of messages that nothing reads are counted, so that they can be shown.
- One that would change what is learned, such as ``images``, is a problem, unless the user has said to ignore it.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kit.data.chat.formats import FORMATS, IGNORE, format_of, listed
from kit.data.chat.messages import REASONING
from kit.errors import Problem

# The keys of a message that ``kit.data.chat.messages`` reads.
MESSAGE_KEYS = frozenset(
    ("role content from value name tool_calls tool_call_id function_call train weight " + " ".join(REASONING)).split()
)
MEDIA = "image images video videos audio audios pixel_values".split()
ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")
MASKS = "attention_mask loss_mask completion_mask assistant_masks".split()
# Columns in which a value may change what is learned, see ``Unused._effect_of_column``.
WATCHED = (
    *(*MEDIA, *ROW_WEIGHTS, *MASKS, "train", "history", "system", "system_prompt", "tools", "functions"),
    *("label", "kto_tag", "role", "parent_id", "position_ids", "labels"),
)
# Keys of a message that say how much of it is learned, but that the kit does not read.
LEARNED_KEYS = {"training": "train", "loss": "train", "loss_weight": "weight", "loss_scale": "weight"}
DETAILS = ("train_detail", "training_detail")
NO_PREFERENCES = "preferences are not trained on yet: remove such rows, which leaves the good answers"
PART_CHOSEN = "which part is learned, and only whole messages can be chosen"


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
        self._format = format_of(fields)
        self._fields = fields
        self._ignored = frozenset(ignored)
        self._read = frozenset(fields.values())
        self._lists: list[str] = []  # the columns that may hold lists of messages
        if self._format.holds_messages:
            self._lists = [fields[ours] for ours in self._format.columns if ours in fields]
        self.counts: Counter[str] = Counter()  # rows in which a column or key has a value

    def check(self, row: Mapping[str, Any]) -> list[Problem]:
        """Count what is not used of a row. Returns a problem for each part that would change what is learned."""
        problems = []
        if extra := row.keys() - self._read:
            for column in sorted(extra):
                if not _is_empty(row[column]):
                    self.counts[column] += 1
                    if column in WATCHED and column not in self._ignored:
                        found, fix = self._effect_of_column(column, row[column], row)
                        if found:
                            problems.append(_problem(column, found, fix))
        keys: dict[str, Problem | None] = {}
        for column in self._lists:
            for name, found, fix in _unused_keys(column, row.get(column)):
                is_harmful = found and name not in self._ignored
                keys[name] = keys.get(name) or (_problem(name, found, fix) if is_harmful else None)
        self.counts.update(keys.keys())
        return problems + [problem for problem in keys.values() if problem]

    def _effect_of_column(self, column: str, value: Any, row: Mapping[str, Any]) -> tuple[str, str]:
        """What would be learned wrongly if ``value`` were ignored, and a way to use it; empty if nothing."""
        name = self._format.columns[0]
        if column in MEDIA:
            return "media, and only text is learned from", ""
        if column == "train" and _is_false(value):
            return "false: a row that is not to be learned from", "remove such rows"
        if column in ROW_WEIGHTS and not _is_one(value):
            return f"a weight of the row ({_short(value)})", "write it as the weight of its assistant messages"
        if name == "input_ids":
            return _effect_on_ids(column, value, row.get(self._fields["input_ids"]))
        if name == "text":
            if column in ("role", "parent_id"):
                return "a row for each message of a conversation, read as plain texts", "join them to lists of messages"
            return "", ""
        if column in ("label", "kto_tag") and _is_false(value, zero=True):
            return f"{_short(value)}: an answer marked as bad would be learned", NO_PREFERENCES
        if column == "history":
            takers = ", or ".join(str(format) for format in FORMATS if "history" in format.optional)
            return f"earlier turns, which only {takers} can have", self._as_instruction("history")
        if column in ("system", "system_prompt"):
            return self._effect_of_system(column)
        if column in ("tools", "functions"):
            takes_tools = "tools" in self._format.optional
            return "tools of the assistant", f"--dataset_columns {column}=tools" if takes_tools else ""
        return "", ""

    def _effect_of_system(self, column: str) -> tuple[str, str]:
        """What would be learned wrongly without a column of system prompts, and a way to use it."""
        if "system" in self._format.optional:
            is_mapped = "system" in self._fields and self._fields["system"] != "system"
            return "a system prompt", "" if is_mapped else f"--dataset_columns {column}=system"
        if self._format.columns == ("messages",):
            flag = f"--dataset_columns {self._fields['messages']}=conversations"
            if column != "system":
                flag += f",{column}=system"
            return "a system prompt beside messages", flag
        return f"a system prompt beside {self._format}", self._as_instruction(column)

    def _as_instruction(self, column: str) -> str:
        """The flag that reads prompt and completion as Alpaca's columns, with ``column``; empty for other formats."""
        if self._format.columns != ("prompt", "completion"):
            return ""
        prompt, completion = self._fields["prompt"], self._fields["completion"]
        more = ",system_prompt=system" if column == "system_prompt" else ""
        return f"--dataset_columns {prompt}=instruction,{completion}=output{more} reads a chat with it"


def _problem(name: str, found: str, fix: str) -> Problem:
    """The problem of a column, or key of messages, that would change what is learned. ``fix``: a way to use it."""
    ignore = f"to ignore it, add {name}={IGNORE} to --dataset_columns"
    return Problem(name, found, fix=f"{fix}; or {ignore}" if fix else ignore)


def _effect_on_ids(column: str, value: Any, ids: Any) -> tuple[str, str]:
    if column == "labels":
        return "given here, and not in the first row", "give labels in every row, or in none"
    if column in MASKS and isinstance(value, list) and not all(value):
        return "masks tokens, which would be learned", "give labels, -100 where nothing is learned; leave padding out"
    if column == "position_ids" and isinstance(ids, list) and value != list(range(len(ids))):
        return "not 0, 1, 2, ...: packed samples would see each other", "give each sample a row; --packing packs them"
    return "", ""


def _unused_keys(column: str, messages: Any) -> Iterator[tuple[str, str, str]]:
    """The keys of messages that are not used: name, what would be learned wrongly (or empty), and a way to use it."""
    if isinstance(messages, str):
        messages = listed(messages)
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or not message.keys() & {"role", "from"}:  # a string may hold any other JSON
            continue
        for key in sorted(message.keys() - MESSAGE_KEYS) if len(message) > 2 else ():
            if not _is_empty(message[key]):
                is_answer = message.get("role", message.get("from")) not in ("system", "user", "human", "tool")
                yield f"{column}.{key}", *_effect_of_key(key, message[key], is_answer)
        parts = message.get("content", message.get("value"))
        for part in parts if isinstance(parts, list) else ():
            for key in sorted(part.keys() - {"type", "text"}) if isinstance(part, dict) else ():
                if not _is_empty(part[key]):
                    chooses = key in DETAILS or key in LEARNED_KEYS or key in ("train", "weight")
                    found = PART_CHOSEN if chooses and not _is_one(part[key]) else ""
                    yield f"{column}.content.{key}", found, ""


def _effect_of_key(key: str, value: Any, is_answer: bool) -> tuple[str, str]:
    """What would be learned wrongly if a key of a message were ignored, and a way to use it; empty if nothing."""
    if key in DETAILS:
        return PART_CHOSEN, ""
    if key in LEARNED_KEYS:
        is_harmful = not _is_one(value) if is_answer else bool(value)
        if is_harmful:
            fix = f"call it {LEARNED_KEYS[key]}, on assistant turns"
            return f"{_short(value)}: how much is learned from a message", fix
    if key in ("label", "kto_tag") and _is_false(value):
        return f"{_short(value)}: an answer marked as bad would be learned", NO_PREFERENCES
    if key in MEDIA:
        return "media, and only text is learned from", ""
    return "", ""


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
