"""Where images stand in messages. Pure: reads no file.

In a text an image is the character ``IMAGE``. A sample with images has them in the key ``images``, in the order of
these characters: each is a path, or the content of a file.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from kit.system.errors import UserError, kind

IMAGE = "\ufdd2"  # a noncharacter, which no text holds, like the marks of ``kit.data.chat.sandbox``
MARK = "<image>"  # in the texts of LLaMA-Factory, ms-swift and others, with a column of images
TYPES = ("image", "image_url", "input_image")  # of the parts of a message: transformers' and Anthropic's, OpenAI's
Reference = str | bytes
_MAX_PATH = 4096  # characters: Linux opens none that is longer
_EXPECTED = "a path, a data: URI, or an object with bytes or path"


def reference(where: str, value: Any) -> Reference:
    """Return the path, or the content, of an image as one of the known formats gives it. Raises ``UserError``."""
    if isinstance(value, dict):
        if value.get("type") == "base64" and isinstance(value.get("data"), str):  # Anthropic's source
            return _decoded(where, value["data"])
        key = next((key for key in ("bytes", "base64", "path", "url", "image") if value.get(key)), "")
        given = value.get(key)
        if isinstance(given, str) and key in ("bytes", "base64"):
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


_OF_IMAGE = ("image_url", "source", "image", "path", "url", "base64")
_NEEDLESS = (
    "type",
    "detail",
    "mime_type",
    "media_type",
    "cache_control",
)  # the size in which it is seen is the model's


def image_of_part(where: str, part: Mapping[str, Any]) -> Reference | None:
    """Return the image of a part of a message; None if it only says where one of the column ``images`` stands."""
    unknown = [key for key, value in part.items() if value and key not in (*_OF_IMAGE, *_NEEDLESS)]
    if unknown:
        raise UserError(where, f"the key {unknown[0]!r} of an image, which is not read", "a part without it")
    given = [part[key] for key in _OF_IMAGE if part.get(key)]
    if not given:
        return None
    return reference(where, {"base64": given[0]} if given[0] is part.get("base64") else given[0])


def images_of_cell(cell: Any) -> Any:
    """Return the images of a row's cell as a list, which a CSV file holds as JSON. What cannot be images stays."""
    if isinstance(cell, str) and cell.startswith(("[", "{")):
        with suppress(ValueError, RecursionError):  # a path may begin like that
            cell = json.loads(cell)
    images = [cell] if isinstance(cell, str | bytes | dict) else cell or []
    # Tables fill what is absent with nulls.
    return images if not isinstance(images, list) or any(map(_holds, images)) else []


def with_images(sample: dict[str, Any], column: Any, has_column: bool = True) -> dict[str, Any]:
    """Return a sample with ``images``, from the parts of its messages or from the column ``images`` of its row.

    Without a part or a mark that says where, the images of the column come first in the first message of the user.

    Args:
        column: of the row, as ``images_of_cell`` returned it.
        has_column: the row has it. Without it, marks are text like any other.

    Raises ``UserError`` if their number is not that of the marks, or if an answer has one.
    """
    lists = {name: value for name, value in sample.items() if _are_messages(value)}
    messages = [message for each in lists.values() for message in each]
    if not column and not any("images" in message for message in messages):
        num_marks = sum(message["content"].count(MARK) for message in messages if message["role"] != "assistant")
        if has_column and num_marks:  # it would be trained on as text
            raise UserError("images", f"none for {num_marks} marks {MARK} in the messages", "as many as marks")
        return sample
    if not isinstance(column, list):
        fix = "--dataset_columns images=ignore, if the column holds no images"
        raise UserError("images", kind(column), "a list of images", fix)
    given = [reference(f"images[{i}]", each) for i, each in enumerate(column)]
    if not messages:
        more = "" if {"chosen", "label"} & sample.keys() else ",completion=output"
        fix = f"--dataset_columns prompt=instruction{more} makes messages of such columns; or write messages"
        raise UserError("images", "given with plain texts", "them with messages", fix)
    changed = {name: [dict(message) for message in each] for name, each in lists.items()}
    messages = [message for each in changed.values() for message in each]
    if any(message["content"].count(IMAGE) != len(message.get("images", ())) for message in messages):
        raise UserError("messages", "the character U+FDD2", "valid Unicode")
    if given and not any("images" in message for message in messages):
        _mark(messages, given)
    of_messages = []
    for message in messages:
        found = message.pop("images", [])
        if found and message["role"] == "assistant":
            raise UserError(
                "messages", "an image in an assistant turn", "images in user turns: image tokens are never supervised"
            )
        of_messages += found
    if len(given) != of_messages.count(None):
        found = f"{len(given)} of them for {of_messages.count(None)} places in the messages"
        raise UserError("images", found, "as many as there are parts without an image, or marks <image>")
    left = iter(given)
    return {**sample, **changed, "images": [next(left) if each is None else each for each in of_messages]}


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value
    )


def _holds(value: Any) -> bool:
    return any(value.values()) if isinstance(value, dict) else bool(value)


def _mark(messages: list[dict[str, Any]], given: list[Reference]) -> None:
    """Put ``IMAGE`` where the texts have ``MARK``, or at the beginning of the first question."""
    if any(MARK in message["content"] for message in messages if message["role"] == "assistant"):
        raise UserError(
            "messages", f"{MARK} in an assistant turn", "images in user turns: image tokens are never supervised"
        )
    asked = [message for message in messages if message["role"] != "assistant"]
    for message in asked:
        if count := message["content"].count(MARK):
            message |= {"content": message["content"].replace(MARK, IMAGE), "images": [None] * count}
    if not any("images" in message for message in asked):
        first = next((message for message in asked if message["role"] == "user"), None)
        if first is None:
            raise UserError("images", "no user message", "one, for the images")
        first |= {"content": IMAGE * len(given) + first["content"], "images": [None] * len(given)}
