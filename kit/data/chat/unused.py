"""Finds columns and keys of a row that its format does not read. Pure.

Promises:

- Columns and keys of messages that nothing reads are counted, so that they can be listed.
- The names below must not be ignored unseen: one with a value that would change the training is a problem, unless
  the user has said to ignore it.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kit.data.chat.formats import IGNORED, Format, opened
from kit.data.chat.media_parts import MEDIA_COLUMNS
from kit.data.chat.messages import KEYS, REASONING, SPEAKERS, are_messages, is_message
from kit.system.errors import Problem

_MEDIA = "media other than text, images and audio, which are not supported"
_UNREAD = (
    "images or audio that are not read here; --dataset_columns {}=images (or audio), with conversations, or with "
    "TEXT=output alone"
)
_PART = "an image or audio that is not read here; write it as a part of the content, or into a column images or audio"
_WEIGHT = "a loss weight; give assistant messages a train or weight"
_MASK = "a loss mask, and only whole messages can be masked; give them a train or weight"
_SYSTEM = "a system prompt; map it to system, which goes with conversations, and with instruction and output"
_TOOLS = "tools of the assistant; map it to tools, which goes with messages and conversations"
_HISTORY = "earlier turns; map it to history, which goes with instruction and output"
_CONTEXT = "more text for the question; map it to input, which goes with instruction and output"
_ASKED = "a question about an image or audio; map it to instruction, which goes with output"
_DOCUMENTS = "documents that a chat template would put into the prompt; write them into the messages"
_CALLS = "tool calls; write them as the tool_calls of an assistant message"
_REASONING = f"the reasoning of an answer; write it as {REASONING[0]}, of a message or with instruction and output"
_VARIABLE = "a variable of the chat template; write it into a column chat_template_kwargs"
_LABEL = "SFT would train on an answer marked as bad; --objective kto takes unpaired preferences"
_TURN = "one message of a conversation in each row; join them to lists"
_PACKED = "how samples are packed; give each sample a row, without this column"
_NOT_FIRST = "a column that the first row lacks; write it into every row, or into none"


def _by_name(named: Mapping[str, str]) -> dict[str, str]:
    return {name: meaning for meaning, names in named.items() for name in names.split()}


COLUMNS = _by_name(
    {
        _UNREAD: "image images audio audios file_name",
        _MEDIA: "video videos pixel_values",
        _WEIGHT: "train training weight loss_weight sample_weight loss_scale loss_multiplier",
        _MASK: "mask attention_mask loss_mask completion_mask response_mask assistant_masks token_mask labels",
        _LABEL: "label kto_tag",
        _SYSTEM: "system system_prompt system_message",
        _TOOLS: "tools functions",
        _HISTORY: "history chat_history conversation_history",
        _CONTEXT: "input context",
        _ASKED: "question prompt query instruction problem",
        _DOCUMENTS: "documents",
        _CALLS: "tool_calls function_calls",
        _REASONING: "reasoning_content",
        _VARIABLE: "enable_thinking reasoning_effort",
        _TURN: "role parent_id",
        _PACKED: "position_ids seq_lengths cu_seqlens segment_ids sequence_ids",
    }
)
# Keys of messages, in lower case without underscores: ``toolCalls`` and ``tool_calls`` are one.
MESSAGE_KEYS = _by_name(
    {
        _PART: "image images imageurl audio audios audiourl inputaudio",
        _MEDIA: "video videos videourl files attachments",
        _WEIGHT: "loss lossweight lossscale lossmask steplossmask train training trainable weight label",
        _MASK: "mask masked tokenmask tokenweights traindetail trainingdetail",
        _REASONING: "thought thoughts cot chainofthought thinkingblocks reasoningdetails reasoningtext toolplan",
        _CALLS: "toolcall toolcalls tooluse toolresult functioncalls tooluseid callid channel recipient",
    }
)
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".wav", ".flac", ".mp3", ".ogg")
# The meanings that also matter in rows of texts, and in rows of ids.
_OF_TEXT = frozenset((_MEDIA, _UNREAD, _WEIGHT, _MASK, _SYSTEM, _TOOLS, _HISTORY, _TURN))
_OF_IDS = frozenset((_MEDIA, _UNREAD, _WEIGHT, _MASK, _PACKED))


def read_keys(ignored: Collection[str]) -> list[str]:
    """Return those of ``ignored`` that are keys of messages that the kit would read: ``messages.thinking``."""
    return sorted(name for name in ignored if name.partition(".")[2] in KEYS)


def without_keys(row: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return ``row`` without the keys of messages in ``names``, as ``read_keys`` returned them."""
    for name in names:
        column, _, key = name.partition(".")
        less = [{k: v for k, v in message.items() if k != key} for message in _messages(row.get(column))]
        row = {**row, column: less} if less else row
    return row


class Unused:
    """The columns and keys of one dataset's rows that its format does not read."""

    def __init__(
        self, format: Format, fields: Mapping[str, str], ignored: Collection[str], is_demonstration: bool = True
    ) -> None:
        """
        Args:
            fields: the columns that are read: our field to their column.
            format: the one they are of.
            ignored: columns, and keys such as ``messages.loss_weight``, that the user wants to be ignored.
            is_demonstration: see ``RowKind``.
        """
        first = format.columns[0]
        self._ignored = frozenset(ignored)
        self._read = frozenset(fields.values())
        self._left_out = {*format.all_or_none} - fields.keys()  # because the first row lacks them
        harmless = {_TURN, _PACKED} | ({_CONTEXT} if first in ("messages", "conversations") else set())
        harmless |= set() if is_demonstration else {_LABEL}
        harmless |= {_LABEL, _WEIGHT, _MASK, _REASONING} if format.are_prompts else set()
        harmless |= {_ASKED} if first not in MEDIA_COLUMNS else set()
        self._harmful = {"text": _OF_TEXT, "input_ids": _OF_IDS}.get(first, frozenset(COLUMNS.values()) - harmless)
        self.counts: Counter[str] = Counter()  # rows in which a column or key has a value

    def check(self, row: Mapping[str, Any]) -> list[Problem]:
        """Count the unused columns and keys of a row. Returns those that would change the training."""
        meanings: dict[str, str] = {}  # of each column or key; empty if it changes nothing
        for column, value in opened(row, self._read).items():
            if column not in self._read:
                if not is_empty(value):
                    meaning = COLUMNS.get(column.rpartition(".")[2], "")
                    changes = meaning in self._harmful and _changes(meaning, column, value)
                    meanings[column] = _NOT_FIRST if column in self._left_out else meaning if changes else ""
                continue
            for message in _messages(value):
                for key, meaning in _unused_keys(message):
                    name = f"{column}.{key}"
                    meanings[name] = meaning or meanings.get(name, "")
        self.counts.update(meanings.keys())
        return [
            _problem(name, meanings[name]) for name in sorted(meanings) if meanings[name] and name not in self._ignored
        ]


def _problem(name: str, meaning: str) -> Problem:
    found, _, step = meaning.partition("; ")
    ignore = f"to ignore it, add {name}=ignore to --dataset_columns"
    return Problem(name, found, fix=f"{step.format(name)}; or {ignore}" if step else ignore)


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages in a column: a list of them, a single one, or a JSON string of a list; empty if it has none."""
    if is_message(value):
        return [value]
    if not are_messages(value):
        return []
    return json.loads(value) if isinstance(value, str) else value


def _changes(meaning: str, column: str, value: Any) -> bool:
    """Whether a value in a column of ``COLUMNS`` would change the training."""
    values = _flat(value)
    if column == "labels":
        return IGNORED in values
    if column == "file_name":  # of datasets' imagefolder and audiofolder
        return any(str(each).lower().endswith(_ENDINGS) for each in values)
    if meaning in (_WEIGHT, _MASK):
        return not all(map(_is_one, values))
    if meaning == _LABEL:
        return str(value).strip().lower() in ("false", "no", "0", "0.0", "-1", "-1.0")
    return True


def _unused_keys(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys of a message that are not read, each with its meaning if that would change the training."""
    texts = ("role", "content") if "role" in message else ("from", "value")
    is_answer = SPEAKERS.get(str(message.get(texts[0])), "assistant") == "assistant"
    has_reasoning = any(map(message.get, REASONING))
    for key in sorted(message.keys() - KEYS - set(texts)):
        if is_empty(message[key]):
            continue
        meaning = MESSAGE_KEYS.get(key.replace("_", "").lower(), "")
        is_harmless = {
            _WEIGHT: all(map(_is_one, _flat(message[key]))) == is_answer,
            _REASONING: has_reasoning or not is_answer,
        }
        yield key, "" if is_harmless.get(meaning) else meaning


def _flat(value: Any) -> list[Any]:
    """The values of a list, which may be given as a JSON string; a single value as a list of it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
    return value if isinstance(value, list) else [value]


def is_empty(value: Any) -> bool:
    """Whether a value says nothing. Tables fill what is absent with nulls, such as ``{"url": null}``."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    if isinstance(value, list | dict):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value is None


def _is_one(value: Any) -> bool:
    return value == 1 or (isinstance(value, str) and value.strip().lower() in ("1", "1.0", "true", "yes"))
