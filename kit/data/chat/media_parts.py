"""Where images and sounds stand in messages. Pure: reads no file.

In a text each is a character of ``MARKS``. A sample with media has them in the key ``media``, in the order of these
characters: each is its kind, and a path or the content of a file.
"""

import base64
import binascii
import json
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from kit.data.media import MediaKind
from kit.system.errors import UserError, kind

# Noncharacters, which no text holds, like the marks of ``kit.data.chat.sandbox``.
MARKS: dict[MediaKind, str] = {"image": "\ufdd2", "audio": "\ufdd3"}
_MARKED = re.compile(f"([{''.join(MARKS.values())}])")
_KINDS = {mark: kind for kind, mark in MARKS.items()}
# In the texts of LLaMA-Factory, ms-swift and others, with a column.
WORDS: dict[MediaKind, str] = {"image": "<image>", "audio": "<audio>"}
MEDIA_COLUMNS: dict[str, MediaKind] = {"images": "image", "audio": "audio"}
# The types of the parts of a message: transformers' and Anthropic's, OpenAI's.
TYPES: dict[Any, MediaKind] = dict.fromkeys(("image", "image_url", "input_image"), "image")
TYPES |= dict.fromkeys(("audio", "audio_url", "input_audio"), "audio")
Reference = str | bytes
_MAX_PATH = 4096  # characters: Linux opens none that is longer
_EXPECTED = "a path, a data: URI, or an object with bytes or path"


def has_media(text: str) -> bool:
    """Whether the text of a message has a mark."""
    return _MARKED.search(text) is not None


def num_media(text: str) -> int:
    """Return the number of marks in the text of a message."""
    return len(_MARKED.findall(text))


def texts_between(text: str) -> list[str]:
    """Return the text of a message before, between and after its marks."""
    return _MARKED.split(text)[::2]


def parts_of(text: str) -> list[dict[str, str]]:
    """Return the text of a message as parts, as a chat template reads them."""
    pieces = [each for each in _MARKED.split(text) if each]
    return [{"type": _KINDS[each]} if each in _KINDS else {"type": "text", "text": each} for each in pieces]


def reference(where: str, value: Any) -> Reference:
    """Return the path, or the content, of a file as one of the known formats gives it. Raises ``UserError``."""
    if isinstance(value, dict):
        if value.get("array") is not None:  # of ``datasets``
            return as_wav(value["array"], value.get("sampling_rate"), where)
        if value.get("type") == "base64" and isinstance(value.get("data"), str):  # Anthropic's source
            return _decoded(where, value["data"])
        key = next((key for key in ("bytes", "base64", "data", "path", "url", "image", "audio") if value.get(key)), "")
        given = value.get(key)
        if isinstance(given, str) and key in ("bytes", "base64", "data"):
            return _decoded(where, given)
        return reference(where, None if isinstance(given, dict) else given)
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        raise UserError(where, kind(value), _EXPECTED)
    scheme, has_scheme, rest = value.partition(":")
    if scheme == "data" and has_scheme:
        return _decoded(where, rest.partition(",")[2])
    if scheme.lower() == "file" and rest.startswith("///"):
        return reference(where, unquote(rest.removeprefix("//")))
    if rest.startswith("//"):
        fix = "download it first, and give its path: the content of a URL may change"
        raise UserError(where, f"a URL ({value[:60]})", _EXPECTED, fix)
    if len(value) > _MAX_PATH:
        fix = 'of base64, write "data:image/png;base64," before it'
        raise UserError(where, f"{len(value)} characters, which are no path ({value[:40]}...)", _EXPECTED, fix)
    return value


def _decoded(where: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError(where, "not base64", _EXPECTED) from None


def as_wav(array: Any, rate: Any, where: str = "") -> bytes:
    """Return samples of one channel as the content of a WAV file. Equal samples are equal files.

    Raises ``UserError`` if they are none.
    """
    if type(rate) is not int or not 0 < rate < 1 << 31:
        raise UserError(f"{where}.sampling_rate", repr(rate)[:80], "a rate in Hz")
    try:
        data = struct.pack(f"<{len(array)}f", *array)
    except (struct.error, TypeError, OverflowError):
        raise UserError(f"{where}.array", "not a list of numbers", "the samples of one channel") from None
    header = struct.pack("<4sIHHIIHH4sI", b"fmt ", 16, 3, 1, rate, 4 * rate & 0xFFFFFFFF, 4, 32, b"data", len(data))
    return struct.pack("<4sI4s", b"RIFF", 4 + len(header) + len(data), b"WAVE") + header + data


_HOLDERS = ("image_url", "input_audio", "audio_url", "source", "image", "audio", "path", "url", "base64")
# The size in which an image is seen is the model's.
_NEEDLESS = ("type", "detail", "mime_type", "media_type", "cache_control")


def part_of(where: str, part: Mapping[str, Any]) -> Reference | None:
    """Return the file of a part of a message; None if it only says where one of a column stands."""
    unknown = [key for key, value in part.items() if value and key not in (*_HOLDERS, *_NEEDLESS)]
    if unknown:
        raise UserError(where, f"the key {unknown[0]!r} of an image or audio, which is not read", "a part without it")
    given = [part[key] for key in _HOLDERS if part.get(key)]
    if not given:
        return None
    return reference(where, {"base64": given[0]} if given[0] is part.get("base64") else given[0])


def media_of_cell(cell: Any) -> Any:
    """Return the media of a row's cell as a list, which a CSV file holds as JSON. What cannot be media stays."""
    if isinstance(cell, str) and cell.startswith(("[", "{")):
        with suppress(ValueError, RecursionError):  # a path may begin like that
            cell = json.loads(cell)
    media = [cell] if isinstance(cell, str | bytes | dict) else cell or []
    # Tables fill what is absent with nulls.
    return media if not isinstance(media, list) or any(map(_holds, media)) else []


def with_media(sample: dict[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample with ``media``, from the parts of its messages or from columns of its row.

    Without a part or a mark that says where, the media of columns come first in the first message of the user.

    Args:
        columns: those of ``MEDIA_COLUMNS`` that the row has, as ``media_of_cell`` returned them. Without a column, its
            marks are text like any other.

    Raises ``UserError`` if their number is not that of the marks.
    """
    lists = {name: value for name, value in sample.items() if _are_messages(value)}
    messages = [message for each in lists.values() for message in each]
    has_parts = any("media" in message for message in messages)
    for column, values in columns.items():
        word = WORDS[MEDIA_COLUMNS[column]]
        num_marks = 0 if values or has_parts else sum(message["content"].count(word) for message in messages)
        if num_marks:  # it would be trained on as text
            raise UserError(column, f"none for {num_marks} marks {word} in the messages", "as many as marks")
    if not any(columns.values()) and not has_parts:
        return sample
    given: dict[MediaKind, list[Reference]] = {}
    for column, values in columns.items():
        if not isinstance(values, list):
            fix = f"--dataset_columns {column}=ignore, if the column holds no {column}"
            raise UserError(column, kind(values), f"a list of {column}", fix)
        given[MEDIA_COLUMNS[column]] = [reference(f"{column}[{i}]", each) for i, each in enumerate(values)]
        if values and not messages:
            more = "" if {"chosen", "label"} & sample.keys() else ",completion=output"
            fix = f"--dataset_columns prompt=instruction{more} makes messages of such columns; or write messages"
            raise UserError(column, "given with plain texts", "them with messages", fix)
    changed = {name: [dict(message) for message in each] for name, each in lists.items()}
    messages = [message for each in changed.values() for message in each]
    if any(num_media(message["content"]) != len(message.get("media", ())) for message in messages):
        raise UserError("messages", "a noncharacter such as U+FDD2", "valid Unicode")
    if not has_parts:
        _mark(messages, given)
    places: list[tuple[MediaKind, Reference | None]] = []
    for message in messages:
        places += message.pop("media", [])
    for column, of_kind in MEDIA_COLUMNS.items():
        num_given, num_places = len(given.get(of_kind, ())), places.count((of_kind, None))
        if num_given != num_places:
            found = f"{num_given} of them for {num_places} places in the messages"
            expected = f"as many as there are parts without one, or marks {WORDS[of_kind]}"
            raise UserError(column, found, expected)
    left = {of_kind: iter(each) for of_kind, each in given.items()}
    media = [(of_kind, next(left[of_kind]) if each is None else each) for of_kind, each in places]
    return {**sample, **changed, "media": media}


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value
    )


def _holds(value: Any) -> bool:
    return any(value.values()) if isinstance(value, dict) else bool(value)


def _mark(messages: list[dict[str, Any]], given: Mapping[MediaKind, list[Reference]]) -> None:
    """Put ``MARKS`` where the texts have ``WORDS``, or at the beginning of the first question."""
    for column, of_kind in MEDIA_COLUMNS.items():
        num_given, mark, word = len(given.get(of_kind, ())), MARKS[of_kind], WORDS[of_kind]
        if not num_given:
            continue
        if any(word in message["content"] for message in messages):
            for message in messages:
                message["content"] = message["content"].replace(word, mark)
            continue
        first = next((message for message in messages if message["role"] == "user"), None)
        if first is None:
            raise UserError(column, "no user message", f"one, for the {column}")
        first["content"] = mark * num_given + first["content"]
    for message in messages:
        if kinds := [_KINDS[mark] for mark in _MARKED.findall(message["content"])]:
            message["media"] = [(of_kind, None) for of_kind in kinds]
