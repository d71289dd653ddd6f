"""Finds what a row holds besides the fields of its format. Pure.

Promises:

- Columns and keys of messages that nothing reads are counted, so that they can be listed.
- The names below must not be ignored unseen: a value under one of them that would change what is learned is a problem,
  unless the user has said to ignore it. So is any key of a call that nothing reads. The names are those of public data
  sets, of other kits and of APIs.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from kit.data.chat.formats import IGNORED, format_of
from kit.data.chat.lists import listed
from kit.data.chat.messages import CALLERS, REASONING, SPEAKERS, unread_call_keys
from kit.data.chat.template import Jinja
from kit.errors import Problem

# The keys of a message that ``kit.data.chat.messages`` reads.
MESSAGE_KEYS = frozenset(
    ("role content from value name tool_calls tool_call_id function_call train weight " + " ".join(REASONING)).split()
)
# Columns in which a value may change what is learned, by what they are about.
COLUMNS = {
    "media": "image images video videos audio audios pixel_values attachments",
    "link": """image_url image_urls image_path image_paths image_file image_files video_url video_urls video_path
        video_paths video_file video_files audio_url audio_urls audio_path audio_paths audio_file audio_files""",
    "train": "train training trainable trained_on learn",
    "weight": "weight loss_weight sample_weight example_weight importance_weight loss_scale loss_multiplier",
    "mask": """mask attention_mask loss_mask token_loss_mask completion_mask response_mask prompt_mask assistant_mask
        assistant_masks action_mask target_mask label_mask labels_mask token_mask train_mask""",
    "labels": "labels",
    "label": "label kto_tag",
    "row of a message": "role parent_id",
    "history": "history chat_history conversation_history",
    "system": "system system_prompt system_message",
    "tools": "tools functions available_tools tool_definitions function_definitions",
    "documents": "documents",
    "calls": "tool_calls function_calls",
    "reasoning": "reasoning_content",
    "variable": """enable_thinking thinking thinking_budget reasoning_effort reasoning_mode preserve_thinking
        clear_thinking keep_past_thinking model_identity builtin_tools custom_tools custom_instructions date_string
        controls response_format""",
    "more": "input context",
    "question": "question query problem trajectory messages conversation conversations",
    "positions": "position_ids",
    "several": """seq_lengths seq_lens sequence_lengths seq_start_id cu_seqlens segment_ids sequence_ids
        document_ids seq_idx""",
}
# Keys of messages in which a value may change what is learned, in lower case with underscores.
KEYS = {
    "learned": """loss step_loss is_loss has_loss compute_loss loss_mask step_loss_mask token_loss_mask loss_weight
        loss_scale loss_multiplier train training trainable is_trainable trained learn supervised train_on train_on_turn
        train_mask train_weight token_mask token_weights weight""",
    "masked": "masked is_masked mask ignore ignored ignore_loss mask_loss no_loss skip_loss no_train skip_train frozen",
    "part": "train_detail training_detail reasoning_train_detail",
    "label": "label kto_tag",
    "media": """image images image_url image_urls image_path image_file video videos video_url video_path audio audios
        audio_url audio_path input_audio media picture photo pixel_values file files file_path file_ids attachment
        attachments""",
    "thought": """reasoning_content thought thoughts think thinking_content thinking_blocks cot chain_of_thought
        rationale scratchpad monologue inner_monologue tool_plan reasoning_text reasoning_details reasoning_summary
        reasoning_content_blocks reasoning_trace reasoning_steps reasoning_items internal_reasoning""",
    "call": """tool_call tool_use tool_uses tool_result tool_results tool_response tool_responses tool_output
        tool_outputs tool_calls tool_invocations function_calls function_response""",
    "id of a call": "call_id tool_use_id tool_call_ids tool_callid",
    "name of a tool": "tool_name function_name",
    "channel": "channel",
    "recipient": "recipient",
    "kwargs": "additional_kwargs",
}
_SUBJECTS = {name: subject for subject, names in COLUMNS.items() for name in names.split()}
_KEY_SUBJECTS = {name: subject for subject, names in KEYS.items() for name in names.split()}
_PARTS_CHOSEN = "which part is learned, and only whole messages can be chosen"
_NO_BAD_ONES = "--objective kto learns from answers with a label; or remove such rows"
# Of each subject what is wrong, and what to do besides ignoring it.
SAID = {
    "media": ("media, and only text is learned from", ""),
    "link": ("media, and only text is learned from", ""),
    "train": ("a row that is not to be learned from", "remove such rows"),
    "weight": ("a weight of the row", "write it as the weight of its assistant messages"),
    "mask": (
        "masks what is learned, and only whole messages can be chosen",
        "give assistant messages a weight, 0 to learn nothing from them",
    ),
    "labels": (f"labels of tokens, of which {IGNORED} is not to be learned", "map input_ids and labels to themselves"),
    "label": ("an answer marked as bad would be learned", _NO_BAD_ONES),
    "row of a message": ("a row for each message of a conversation, read as plain texts", "join them to lists"),
    "history": ("earlier turns", "map it to history, which goes with instruction and output"),
    "system": ("a system prompt", "map it to system, which goes with conversations, and with instruction and output"),
    "second system": ("a system prompt, and the messages begin with another one", ""),
    "tools": ("tools of the assistant", "map it to tools, which goes with messages and conversations"),
    "documents": ("documents that a chat template would put into the prompt", "write them into the messages"),
    "calls": ("calls of tools", "write them as the tool_calls of an assistant message"),
    "reasoning": (
        "the reasoning of an answer",
        "map it to reasoning_content, which goes with instruction and output, or write it into the message",
    ),
    "variable": ("a value of a variable of the chat template", "write it into a column chat_template_kwargs"),
    "more": ("more text for the question", "map it to input, which goes with instruction and output"),
    "question": (
        "a question that is not read as the prompt",
        "map it to prompt; or, to make chats of texts, to instruction",
    ),
    "labels of ids": ("given here, and not in the first row", "give labels in every row, or in none"),
    "mask of ids": ("masks tokens, which would be learned", f"give labels, {IGNORED} where nothing is learned"),
    "positions": ("not 0, 1, 2, ...: packed samples would see each other", "give each sample a row"),
    "several": ("several samples in a row, which would see each other", "give each sample a row"),
    "learned": ("how much is learned from a message", "call it train (true, false) or weight, on assistant turns"),
    "masked": ("how much is learned from a message", 'write "train": true or false, on assistant turns'),
    "part": (_PARTS_CHOSEN, ""),
    "label of a message": ("an answer marked as bad would be learned", 'write "train": false, or remove such rows'),
    "thought": ("the reasoning of an answer, under a name that is not read", f"call it {REASONING[0]}, as a string"),
    "call": (
        "a call or the result of one, under a name that is not read",
        "calls are tool_calls of an assistant turn, and a result is a message of the role tool",
    ),
    "id of a call": ("a name that is not read", "call it tool_call_id"),
    "name of a tool": ("a name that is not read", "call it name"),
    "channel": ("a thought, or a call, would be learned as an answer", f"write thoughts as {REASONING[0]}"),
    "recipient": ("a call would be learned as an answer", "write it as tool_calls"),
    "kwargs": ("calls or reasoning that would not be learned", "write them beside the content"),
    "key of a call": ("a key of a call that nothing reads", "a call is a name with arguments"),
    "other name": ("differs from the key of the same meaning: only one of them can be meant", ""),
}


def is_watched(column: str) -> bool:
    """Whether a value in a column that is not read may change what is learned."""
    return column in _SUBJECTS


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

    def __init__(self, fields: Mapping[str, str], ignored: Collection[str], template: Jinja = None) -> None:
        """
        Args:
            fields: the columns that are read: our field to their column.
            ignored: columns, and keys such as ``messages.loss_weight``, that the user wants to be ignored.
            template: the Jinja text of the chat template.
        """
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
        harmful: dict[str, tuple[str, Any]] = {}  # by name: its subject, and a value
        for column in sorted(row.keys() - self._read):
            if not _is_empty(row[column]):
                self.counts[column] += 1
                if subject := self._subject_of_column(column, row[column], row):
                    harmful[column] = subject, row[column]
        keys: set[str] = set()
        for name, subject, value in self._unused_keys(row):
            keys.add(name)
            if subject:
                harmful.setdefault(name, (subject, value))
        self.counts.update(keys)
        return [_problem(name, *what) for name, what in harmful.items() if name not in self._ignored]

    def _subject_of_column(self, column: str, value: Any, row: Mapping[str, Any]) -> str:
        """The subject in ``SAID`` of a column whose value would change what is learned; empty if it would not."""
        subject = _SUBJECTS.get(column, "")
        name = self._format.columns[0]
        is_text, are_ids, is_answer = name == "text", name == "input_ids", self._format.rows == "answers"
        if subject in ("media", "train", "weight"):
            is_harmful = subject == "media" or _is_false(value) if subject != "weight" else not _is_one(value)
        elif are_ids:
            subject = {"labels": "labels of ids", "mask": "mask of ids"}.get(subject, subject)
            is_harmful = _is_said_of_ids(subject, column, value, row.get(self._fields["input_ids"]))
        elif subject == "mask":
            is_harmful = column != "attention_mask" and not _are_ones(value)  # that one masks padding
        elif subject == "labels":
            is_harmful = IGNORED in _flat(value)
        elif subject == "label":
            is_harmful = is_answer and not is_text and (_is_false(value) or _is_negative(value))
        elif subject == "row of a message":
            is_harmful = is_text
        elif subject == "system":
            is_harmful = not self._is_shown(value, row)
            first = _first_message(row.get(self._fields[self._question]))
            if first.get("role", first.get("from")) in ("system", "developer"):
                subject = "second system"
        elif subject in ("history", "tools"):
            is_harmful = True
        elif subject == "calls":
            is_harmful = not is_text and isinstance(listed(value), list | dict)
        elif subject == "variable":
            is_harmful = self._is_variable(column, value, row)
        elif subject in ("question", "more") and self._question in ("chosen", "completion"):
            subject = "question"  # of texts, of which the prompt would be what they begin with
            is_harmful = isinstance(row.get(self._fields[self._question]), str)
        elif subject == "more":
            is_harmful = self._question in ("prompt", "instruction") and not self._is_shown(value, row)
        else:
            is_harmful = subject in ("link", "documents", "reasoning") and not is_text
        return subject if is_harmful else ""

    def _unused_keys(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """The keys of messages and calls that are not used: name, subject if it does harm, and value."""
        for column in self._lists:
            messages = listed(row.get(column))
            for message in messages if isinstance(messages, list) else []:
                # Strings may hold any JSON.
                if isinstance(message, dict) and ("role" in message or "from" in message):
                    for key, subject, value in _keys_of(message):
                        if not _is_empty(value):
                            yield f"{column}.{key}", subject, value
        if self._format.columns[0] == "tool_calls":
            column = self._fields["tool_calls"]
            for key, value in unread_call_keys({"tool_calls": row.get(column)}):
                if not _is_empty(value):
                    yield f"{column}{key.removeprefix('tool_calls')}", "key of a call", value

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


def _problem(name: str, subject: str, value: Any) -> Problem:
    """The problem of a column, or key of messages, that would change what is learned."""
    found, step = SAID[subject]
    if isinstance(value, int | float):  # not texts: what many rows have in common is said once
        found = f"{str(value).lower()}: {found}"
    ignore = f"to ignore it, add {name}=ignore to --dataset_columns"
    return Problem(name, found, fix=f"{step}; or {ignore}" if step else ignore)


def _first_message(messages: Any) -> Mapping[str, Any]:
    """The first message of a list, which may be given as a string; empty if there is none."""
    messages = listed(messages)
    return messages[0] if isinstance(messages, list) and messages and isinstance(messages[0], dict) else {}


def _is_said_of_ids(subject: str, column: str, value: Any, ids: Any) -> bool:
    """Whether a column beside ``input_ids`` says something of them."""
    if subject == "positions":
        return isinstance(ids, list) and _flat(value) != list(range(len(ids)))
    if subject == "several":
        if column.endswith(("_ids", "_idx")):  # a number of each token's sample
            return len(set(map(str, _flat(value)))) > 1
        return len(_flat(value)) > (2 if column == "cu_seqlens" else 1)  # lengths; or where each begins and ends
    return subject == "labels of ids" or (subject == "mask of ids" and not _are_ones(value))


def _keys_of(message: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The keys of a message, of its parts and of its calls that are not used, as ``_unused_keys`` gives them."""
    speaker = message.get("role", message.get("from"))
    role = SPEAKERS.get(speaker, "assistant") if isinstance(speaker, str) else "assistant"
    for key in sorted(message.keys() - MESSAGE_KEYS):
        yield key, _subject_of_key(key, message[key], role, message), message[key]
    if ("role" in message or "content" in message) and ("from" in message or "value" in message):
        yield from _other_names(message)
    if "tool_calls" in message or "function_call" in message or speaker in CALLERS:
        for key, value in unread_call_keys(message):
            yield key, "key of a call", value
    parts = message.get("content", message.get("value"))
    for part in parts if isinstance(parts, list) else ():
        for key in sorted(part.keys() - {"type", "text"}) if isinstance(part, dict) else ():
            subject = _key_subject(key)
            is_part = subject in ("learned", "masked", "part") and not _is_one(part[key])
            yield f"content.{key}", "part" if is_part else subject if subject == "media" else "", part[key]


def _other_names(message: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The keys ``from`` and ``value`` beside ``role`` and ``content``: whether they say something else."""
    has_role = message.get("role") is not None
    for theirs, ours in (("from", "role"), ("value", "content")):
        one, other = message.get(theirs), message.get(ours)
        if _is_empty(one) or _is_empty(other):
            continue
        if ours == "role" and isinstance(one, str) and isinstance(other, str):
            one, other = SPEAKERS.get(one), SPEAKERS.get(other)  # None: no role, but perhaps the name of somebody
        if one != other:
            are_alike = isinstance(one, str) and isinstance(other, str)
            unread = theirs if has_role else ours
            yield unread, "other name" if are_alike else "", message[unread]


@cache
def _key_subject(key: str) -> str:
    return _KEY_SUBJECTS.get(re.sub("(?<=[a-z])(?=[A-Z])", "_", key).lower().replace("-", "_"), "")


def _subject_of_key(key: str, value: Any, role: str, message: Mapping[str, Any]) -> str:
    """The subject in ``SAID`` of a key whose value would change what is learned; empty if it would not."""
    subject = _key_subject(key)
    is_answer = role == "assistant"
    is_harmful = subject in ("part", "media", "call")
    if subject == "learned":
        is_harmful = not _are_ones(value) if is_answer else not all(map(_is_false, _flat(value)))
        subject = "part" if isinstance(value, list) else subject
    elif subject == "masked":
        is_harmful = is_answer and (key == "mask" or not _is_false(value))  # a mask may mean either
    elif subject == "label":
        is_harmful, subject = _is_false(value) or _is_negative(value), "label of a message"
    elif subject == "thought":
        # APIs give the same thoughts twice.
        is_read = any(map(message.get, REASONING)) or "</think>" in str(message.get("content", message.get("value")))
        is_harmful = is_answer and not is_read and not isinstance(value, bool | int | float)
    elif subject in ("id of a call", "name of a tool"):
        is_harmful = role == "tool" and value != message.get("tool_call_id" if subject == "id of a call" else "name")
    elif subject == "channel":
        is_harmful = is_answer and value in ("analysis", "commentary")
    elif subject == "recipient":
        is_harmful = is_answer and value not in ("all", "assistant", "user")
    elif subject == "kwargs":  # of LangChain, which usually says the same in tool_calls
        hidden = [
            name for name in ("tool_calls", "function_call", *REASONING) if isinstance(value, dict) and value.get(name)
        ]
        is_harmful = bool(hidden) and not any(map(message.get, hidden[:1]))
    return subject if is_harmful else ""


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


def _is_false(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("false", "no", "0", "0.0")
    return isinstance(value, int | float) and value == 0


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
