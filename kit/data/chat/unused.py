"""Finds what a row holds besides the fields of its format. Pure.

Promises:

- Columns and keys of messages that nothing reads are counted, so that they can be shown.
- One that would change what is learned, such as ``images``, is a problem, unless the user has said to ignore it. So is
  any key of a call that nothing reads.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from kit.data.chat.columns_flag import columns_flag
from kit.data.chat.formats import FORMATS, IGNORE, IGNORED, format_of, to_sample
from kit.data.chat.lists import listed
from kit.data.chat.messages import ARGUMENTS, CALLERS, REASONING, SPEAKERS, unread_call_keys
from kit.data.chat.template import Jinja
from kit.data.chat.watched import MESSAGE_KEYS, SUBJECTS, subject_of_key
from kit.errors import Problem

NO_BAD_ONES = "remove such rows, which leaves the good answers"
PART_CHOSEN = "which part is learned, and only whole messages can be chosen"
NOTHING = ("", "")  # instead of an effect and a way to use it


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

    def __init__(
        self,
        fields: Mapping[str, str],
        ignored: Collection[str],
        template: Jinja = None,
        flag: Callable[[Mapping[str, str]], str] = columns_flag,
    ) -> None:
        """
        Args:
            fields: the columns that are read: our field to their column.
            ignored: columns, and keys such as ``messages.loss_weight``, that the user wants to be ignored.
            template: the Jinja text of the chat template.
            flag: returns the flag that adds to the mapping of columns.
        """
        self._flag = flag
        self._template = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        self._format = format_of(fields)
        self._fields = fields
        self._ignored = frozenset(ignored)
        self._read = frozenset(fields.values())
        self._lists: list[str] = []  # the columns that may hold lists of messages
        if self._format.holds_messages:
            given = (*self._format.columns, *self._format.all_or_none)
            self._lists = [fields[ours] for ours in given if ours in fields]
        # Our name of the column with the question: of preferences the prompt, or the answers that begin with it.
        names = ("instruction", "prompt", "chosen", "completion")
        is_answer = self._format.rows == "answers"
        self._question = self._format.columns[0] if is_answer else next(name for name in names if name in fields)
        self.counts: Counter[str] = Counter()  # rows in which a column or key has a value

    def check(self, row: Mapping[str, Any]) -> list[Problem]:
        """Count what is not used of a row. Returns a problem for each part that would change what is learned."""
        problems = []
        if extra := row.keys() - self._read:
            for column in sorted(extra):
                if not _is_empty(row[column]):
                    self.counts[column] += 1
                    if column in SUBJECTS and column not in self._ignored:
                        found, fix = self._effect_of_column(column, row[column], row)
                        if found:
                            problems.append(self._problem(column, found, fix))
        keys: dict[str, Problem | None] = {}
        for column in self._lists:
            for name, found, fix in _unused_keys(column, row.get(column)):
                is_harmful = found and name not in self._ignored
                keys[name] = keys.get(name) or (self._problem(name, found, fix) if is_harmful else None)
        if self._format.columns[0] == "tool_calls":
            column = self._fields["tool_calls"]
            for key, value in unread_call_keys({"tool_calls": row.get(column)}):
                if not _is_empty(value):
                    name = f"{column}{key.removeprefix('tool_calls')}"
                    keys[name] = None if name in self._ignored else self._problem(name, *_effect_of_call_key(value))
        self.counts.update(keys.keys())
        return problems + [problem for problem in keys.values() if problem]

    def _problem(self, name: str, found: str, fix: str) -> Problem:
        """The problem of a column, or key of messages, that would change what is learned. ``fix``: a way to use it."""
        ignore = f"to ignore it, {self._flag({name: IGNORE})}"
        return Problem(name, found, fix=f"{fix}; or {ignore}" if fix else ignore)

    def _effect_of_column(self, column: str, value: Any, row: Mapping[str, Any]) -> tuple[str, str]:
        """What would be learned wrongly if ``value`` were ignored, and a way to use it; empty if nothing."""
        subject = SUBJECTS[column]
        name = self._format.columns[0]
        if subject == "media" or (subject == "link" and name not in ("input_ids", "text")):
            return "media, and only text is learned from", ""
        if subject == "train" and _is_false(value, zero=True):
            return f"{_short(value)}: a row that is not to be learned from", "remove such rows"
        if subject == "weight" and not _is_one(value):
            return f"a weight of the row ({_short(value)})", "write it as the weight of its assistant messages"
        if name == "input_ids":
            return _effect_on_ids(subject, value, row.get(self._fields["input_ids"]))
        if subject == "mask" and column != "attention_mask":  # that one masks padding
            return self._effect_of_mask(value)
        if subject == "labels" and IGNORED in _flat(value):
            fix = "--dataset_columns input_ids=input_ids,labels=labels reads these" if "input_ids" in row else ""
            return f"labels of tokens, of which {IGNORED} is not to be learned, beside {self._format}", fix
        if subject == "message" and name == "text":
            return "a row for each message of a conversation, read as plain texts", "join them to lists of messages"
        is_answer = name != "text" and self._format.rows == "answers"
        if subject == "label" and is_answer and (_is_false(value, zero=True) or _is_negative(value)):
            return f"{_short(value)}: an answer marked as bad would be learned", self._as_rated(column, row)
        if subject == "history":
            takers = ", or ".join(str(format) for format in FORMATS if "history" in format.optional)
            return f"earlier turns, which only {takers} can have", self._as_instruction(column, "history", row)
        if subject == "system" and not self._is_shown(value, row):
            return self._effect_of_system(column, row)
        if subject == "tools":
            takes_tools = "tools" in self._format.optional
            return "tools of the assistant", self._flag({column: "tools"}) if takes_tools else ""
        if subject == "calls" and name != "text" and isinstance(listed(value), list | dict):
            return f"calls beside {self._format}", "write them as the tool_calls of an assistant message"
        if subject == "reasoning" and name != "text":
            fix = self._as_instruction(column, "reasoning_content", row)
            return f"the reasoning of an answer beside {self._format}", fix
        if subject == "documents" and name != "text":
            return "documents that a chat template would put into the prompt", "write them into the messages"
        if subject == "variable" and self._is_variable(column, value, row):
            fix = f'write it into a column chat_template_kwargs, as {{"{column}": ...}}'
            return f"a value of a variable of the chat template ({_short(value)})", fix
        question = self._question
        if subject == "more" and question in ("prompt", "instruction") and not self._is_shown(value, row):
            if question == "instruction":
                fix = (
                    ""
                    if "input" in self._fields and not _is_empty(row.get(self._fields["input"]))
                    else self._flag({column: "input"})
                )
            else:
                fix = self._as_instruction(column, "input", row)
            return f"more text for the question, which {self._format} would be learned without", fix
        return NOTHING

    def _effect_of_mask(self, value: Any) -> tuple[str, str]:
        if _are_ones(value):
            return NOTHING
        fix = "give assistant messages a weight, 0 to learn nothing from them" if self._format.holds_messages else ""
        return "masks what is learned, and only whole messages can be chosen", fix

    def _effect_of_system(self, column: str, row: Mapping[str, Any]) -> tuple[str, str]:
        """What would be learned wrongly without a column of system prompts, and a way to use it."""
        first = _first_message(row.get(self._fields[self._question]))
        if first.get("role", first.get("from")) in ("system", "developer"):
            return "a system prompt, and the messages begin with another one", ""
        if "system" in self._format.optional:
            is_mapped = "system" in self._fields and self._fields["system"] != "system"
            return "a system prompt", "" if is_mapped else self._flag({column: "system"})
        if self._format.columns == ("messages",):
            columns = {self._fields["messages"]: "conversations"} | ({} if column == "system" else {column: "system"})
            return "a system prompt beside messages", self._flag(columns)
        return f"a system prompt beside {self._format}", self._as_instruction(column, "system", row)

    def _as_instruction(self, column: str, ours: str, row: Mapping[str, Any]) -> str:
        """The flag that reads prompt and completion as Alpaca's columns, with ``column`` as our field ``ours``.

        Of preferences the prompt alone. Empty for formats that have no prompt, or do not take ``ours`` beside
        instructions; and if they are lists of messages, beside which only ``system`` can be read.
        """
        has_preferences = self._format.rows != "answers"
        if "prompt" not in self._fields or (has_preferences and ours not in self._format.optional):
            return ""
        if ours != "system" and not isinstance(row.get(self._fields["prompt"]), str):
            return ""
        columns = {self._fields["prompt"]: "instruction"}
        if not has_preferences:
            columns[self._fields["completion"]] = "output"
        if column != ours:
            columns[column] = ours
        return f"{self._flag(columns)} reads a chat with it"

    def _as_rated(self, column: str, row: Mapping[str, Any]) -> str:
        """What to do about an answer that ``column`` marks as bad: the objective that learns from it, if one can."""
        as_rated = {"messages": "completion", "conversations": "completion", "output": "completion"}
        takes = next(format for format in FORMATS if format.rows == "rated")
        unread = row.keys() - self._read - self._ignored
        fields = {name: name for name in takes.fields if name in unread}
        fields |= {as_rated.get(ours, ours): theirs for ours, theirs in self._fields.items() if row.get(theirs)}
        fields["label"] = column
        ordered = {ours: fields[ours] for ours in takes.fields if ours in fields}
        if len(ordered) < len(fields) or "completion" not in fields or isinstance(to_sample(row, ordered), list):
            return NO_BAD_ONES
        before = {theirs: ours for ours, theirs in self._fields.items()}
        mapping = {
            theirs: ours for ours, theirs in ordered.items() if theirs != ours or before.get(theirs, ours) != ours
        }
        flag = f"--objective kto {self._flag(mapping)}" if mapping else "--objective kto"
        return f"{flag} learns from good and bad answers; or {NO_BAD_ONES}"

    def _is_variable(self, column: str, value: Any, row: Mapping[str, Any]) -> bool:
        """Whether the chat template would read ``value`` if it were among the row's ``chat_template_kwargs``."""
        theirs = self._fields.get("chat_template_kwargs", "")
        if not theirs or column in str(row.get(theirs)) or (column == "thinking" and not isinstance(value, bool)):
            return False
        return bool(re.search(rf"\b{column}\b", self._template))

    def _is_shown(self, value: Any, row: Mapping[str, Any]) -> bool:
        """Whether the text, the question or the first message holds ``value``, so that nothing is lost."""
        given = row.get(self._fields[self._question])
        message = _first_message(given)
        first = message.get("content", message.get("value")) if message else given
        return isinstance(value, str) and isinstance(first, str) and value.strip() in first


def _first_message(messages: Any) -> Mapping[str, Any]:
    """The first message of a list, which may be given as a string; empty if there is none."""
    messages = listed(messages)
    return messages[0] if isinstance(messages, list) and messages and isinstance(messages[0], dict) else {}


def _effect_on_ids(subject: str, value: Any, ids: Any) -> tuple[str, str]:
    """What a column beside ``input_ids`` says of them, and a way to use it; empty if it says nothing."""
    if subject == "labels":
        return "given here, and not in the first row", "give labels in every row, or in none"
    if subject == "mask" and not _are_ones(value):
        return "masks tokens, which would be learned", "give labels, -100 where nothing is learned; leave padding out"
    if subject == "positions" and isinstance(ids, list) and _flat(value) != list(range(len(ids))):
        return "not 0, 1, 2, ...: packed samples would see each other", "give each sample a row; --packing packs them"
    if (
        (subject == "lengths" and len(_flat(value)) > 1)
        or (subject == "borders" and len(_flat(value)) > 2)
        or (subject == "numbers" and len(set(map(str, _flat(value)))) > 1)
    ):
        return "several samples in a row, which would see each other", "give each sample a row; --packing packs them"
    return NOTHING


def _unused_keys(column: str, messages: Any) -> Iterator[tuple[str, str, str]]:
    """The keys of messages that are not used: name, what would be learned wrongly (or empty), and a way to use it."""
    if isinstance(messages, str):
        messages = listed(messages)
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or not ("role" in message or "from" in message):  # strings may hold any JSON
            continue
        speaker = message.get("role", message.get("from"))
        if len(message) > 2 or speaker in CALLERS:
            for key, found, fix in _unused_keys_of(message, speaker):
                yield f"{column}.{key}", found, fix
        parts = message.get("content", message.get("value"))
        for part in parts if isinstance(parts, list) else ():
            for key in sorted(part.keys() - {"type", "text"}) if isinstance(part, dict) else ():
                if not _is_empty(part[key]):
                    yield f"{column}.content.{key}", _effect_of_part(key, part[key]), ""


def _unused_keys_of(message: Mapping[str, Any], speaker: Any) -> Iterator[tuple[str, str, str]]:
    """The keys of a message, and of its calls, that are not used, as ``_unused_keys`` gives them."""
    if unread := message.keys() - MESSAGE_KEYS:
        role = SPEAKERS.get(speaker, "assistant") if isinstance(speaker, str) else "assistant"
        for key in sorted(unread):
            if not _is_empty(message[key]):
                yield key, *_effect_of_key(key, message[key], role, message)
    if ("role" in message or "content" in message) and ("from" in message or "value" in message):
        for key, found in _other_names(message):
            yield key, found, ""
    if "tool_calls" in message or "function_call" in message or speaker in CALLERS:
        for key, value in unread_call_keys(message):
            if not _is_empty(value):
                yield key, *_effect_of_call_key(value)


def _effect_of_call_key(value: Any) -> tuple[str, str]:
    fix = f"a call is a name, and beside it its arguments, called {', '.join(ARGUMENTS[:-1])} or {ARGUMENTS[-1]}"
    return f"a key of a call that nothing reads ({_short(value)})", fix


def _other_names(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys ``from`` and ``value`` beside ``role`` and ``content`` that say something else, and what is wrong."""
    has_role = message.get("role") is not None
    for theirs, ours in (("from", "role"), ("value", "content")):
        one, other = message.get(theirs), message.get(ours)
        if _is_empty(one) or _is_empty(other):
            continue
        if ours == "role" and isinstance(one, str) and isinstance(other, str):
            one, other = SPEAKERS.get(one), SPEAKERS.get(other)  # None: no role, but perhaps the name of somebody
        if one != other:
            unread, read = (theirs, ours) if has_role else (ours, theirs)
            are_alike = isinstance(one, str) and isinstance(other, str)
            yield unread, f"differs from {read}: only one of them can be meant" if are_alike else ""


def _effect_of_key(key: str, value: Any, role: str, message: Mapping[str, Any]) -> tuple[str, str]:
    """What would be learned wrongly if a key of a message were ignored, and a way to use it; empty if nothing."""
    subject = subject_of_key(key)
    is_answer = role == "assistant"
    if not subject:
        return NOTHING
    if subject == "detail":
        return PART_CHOSEN, ""
    if subject == "learned":
        is_harmful = not _are_ones(value) if is_answer else not all(_is_false(each, zero=True) for each in _flat(value))
        if is_harmful and isinstance(value, list):
            return PART_CHOSEN, ""
        if is_harmful:
            fix = f"call it {'train' if isinstance(value, bool) else 'weight'}, on assistant turns"
            return f"{_short(value)}: how much is learned from a message", fix
    if subject == "masked" and is_answer and (key == "mask" or not _is_false(value, zero=True)):
        fix = 'write "train": false, on assistant turns'
        if key == "mask":
            fix = 'write "train": true or false, on assistant turns: a mask may mean either'
        return f"{_short(value)}: how much is learned from a message", fix
    if subject == "label" and (_is_false(value) or _is_negative(value)):
        return f"{_short(value)}: an answer marked as bad would be learned", f'write "train": false; or {NO_BAD_ONES}'
    if subject == "media":
        if re.match("file|attachment", key):
            found = f"a file beside the text ({_short(value)}), which the model would not see"
            return found, "if the answers need it, write its text into the content"
        return "media, and only text is learned from", ""
    if subject == "reasoning" and is_answer and not isinstance(value, bool | int | float):
        content = message.get("content", message.get("value"))
        are_read = any(message.get(name) for name in REASONING) or "</think>" in str(content)
        if not are_read:  # elsewhere too, as by APIs that give the same thoughts twice
            return "the reasoning of an answer, under a name that is not read", f"call it {REASONING[0]}, as a string"
    if subject == "call":
        found = "a call or the result of one, under a name that is not read"
        return found, "calls are tool_calls of an assistant turn, and a result is a message of the role tool"
    if subject in ("call_id", "tool_name") and role == "tool":
        ours = "tool_call_id" if subject == "call_id" else "name"
        return NOTHING if value == message.get(ours) else ("a name that is not read", f"call it {ours}")
    if subject == "channel" and is_answer and value in ("analysis", "commentary"):
        found = f"{value}: a thought, or a call, would be learned as an answer"
        return found, f"write thoughts as {REASONING[0]}, and calls as tool_calls, of the answer"
    if subject == "recipient" and is_answer and value not in ("all", "assistant", "user"):
        return f"{_short(value)}: a call would be learned as an answer", "write it as tool_calls"
    if subject == "kwargs" and isinstance(value, dict):  # of LangChain, which usually says the same in tool_calls
        hidden = [name for name in ("tool_calls", "function_call", *REASONING) if value.get(name)]
        if hidden and not any(message.get(name) for name in hidden[:1]):
            return f"it holds {hidden[0]}, which would not be learned", f"write {hidden[0]} beside the content"
    return NOTHING


def _effect_of_part(key: str, value: Any) -> str:
    """What would be learned wrongly if a key of a part of a message were ignored; empty if nothing."""
    subject = subject_of_key(key)
    if subject in ("learned", "masked", "detail") and not _is_one(value):
        return PART_CHOSEN
    return "media, and only text is learned from" if subject == "media" else ""


def _flat(value: Any) -> list[Any]:
    """The values of a list, which may be given as a string; a single value as a list of it."""
    value = listed(value)
    return value if isinstance(value, list) else [value]


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value or value.strip() in ("", "[]", "{}", "null")
    # Tables fill what is absent with nulls, such as {"url": null} in a part without an image.
    if isinstance(value, list | dict):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return value is None


def _is_false(value: Any, zero: bool = False) -> bool:
    words = ("false", "no", "0", "0.0") if zero else ("false", "no")
    return value is False or (zero and value == 0) or (isinstance(value, str) and value.strip().lower() in words)


def _is_negative(value: Any) -> bool:
    if isinstance(value, str):
        return bool(re.fullmatch(r"\s*-\d+(\.\d+)?\s*", value))
    return isinstance(value, int | float) and value < 0


def _are_ones(value: Any) -> bool:
    """Whether all values of a mask are 1."""
    values = _flat(value)
    return values.count(1) == len(values) or all(map(_is_one, values))


def _is_one(value: Any) -> bool:
    return value == 1 or (isinstance(value, str) and value.strip().lower() in ("1", "1.0", "true", "yes"))


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 20 else text[:20] + "..."
