"""Converts the messages of a conversation, in OpenAI's or ShareGPT's form, to messages in the kit's form. Pure.

``kit.data.chat.formats`` describes the kit's form. Lists of messages, tools and calls may be JSON strings, as in a
table of cells. ``Problem.where`` of an error is the field, such as ``messages[2].role``.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from kit.data.chat.media_parts import MARKS, TYPES, Reference, part_of
from kit.data.media import MediaKind
from kit.data.strict_json import RepeatedKey, parse
from kit.system.errors import UserError, did_you_mean, kind

CALLERS = ("function_call", "tool_call")  # roles of turns whose text is a call: of ShareGPT, and of ms-swift
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "developer": "system",
    "function": "tool",
    "tool_response": "tool",
    **dict.fromkeys(CALLERS, "assistant"),
}
# The names of roles in ShareGPT and the formats derived from it.
SPEAKERS = ROLES | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
# The names of an answer's reasoning: transformers' own, gpt-oss's, and that of several APIs.
REASONING = ("reasoning_content", "thinking", "reasoning")
# The keys of a message that are read here, in addition to role and text.
KEYS = frozenset(("name", "tool_call_id", "tool_calls", "function_call", "train", "weight", *REASONING))
# The keys of a call that are read or say nothing: its number in a list, the state of an answer.
CALL_KEYS = frozenset(("id", "function", "type", "index", "status", "name", "arguments"))
A_TOOL = 'an object such as {"type": "function", "function": {"name": "search", "parameters": {...}}}'
# Space, control characters, what Unicode calls default ignorable code points, and the blank of Braille: text of nothing
# else looks empty.
INVISIBLE = re.compile(
    "[\\s\0-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]*"
)
Message = dict[str, Any]


def check_text(where: str, value: Any, may_be_empty: bool = False) -> str:
    """Return a value that is text. Raises ``UserError`` if it is no string, is blank, or cannot be encoded as UTF-8.

    ``may_be_empty``: spaces, or nothing, stand for no text. Invisible characters never do: they would be trained on.
    """
    if not isinstance(value, str):
        raise UserError(where, kind(value), "a string")
    if INVISIBLE.fullmatch(value) and (value.strip() or not may_be_empty):
        found = f"only invisible characters (U+{ord(value.strip()[0]):04X})" if value.strip() else "empty"
        raise UserError(where, found, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"half of a surrogate pair at character {error.start}"
        raise UserError(where, found, "valid Unicode") from None
    return value


def are_messages(value: Any) -> bool:
    """Whether a value is a list of messages, or a JSON string of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def is_message(value: Any) -> bool:
    """Whether a value is an object that says who speaks."""
    return isinstance(value, dict) and ("role" in value or "from" in value)


def system_message(values: Mapping[str, Any]) -> list[Message]:
    """The column ``system`` as a list of one system message; an empty list if the column is blank or absent."""
    system = values.get("system")
    is_given = system is not None and check_text("system", system, may_be_empty=True).strip()
    return [{"role": "system", "content": system}] if is_given else []


def check_no_system(values: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if the column ``system`` holds something, in a row of texts, where no message can stand."""
    if system_message(values):
        raise UserError("system", "given with plain texts", "the question as instruction, which makes a chat")


def after_system(values: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return ``messages`` after the column ``system``, which they may repeat. Raises ``UserError`` if they differ."""
    system = system_message(values)
    if system and messages and messages[0]["role"] == "system":
        if messages[0]["content"].strip() != system[0]["content"].strip():
            raise UserError("system", "another one than the system message of the conversation", "one of them")
        messages = messages[1:]
    return system + messages


def read_messages(
    where: str,
    given: Any,
    roles: Mapping[str, str] = ROLES,
    may_begin: bool = True,
    needs_answer: bool = True,
) -> list[Message]:
    """Convert a list of messages to our form. Raises ``UserError`` with the first thing that is wrong.

    Args:
        where: the field that holds the messages, for messages to the user.
        given: the value of that field, of any type.
        roles: the names that roles may have, each with our role. With ``SPEAKERS``, messages may also have ``from``
            and ``value`` instead of ``role`` and ``content``, and a first system message that is blank is left out.
        may_begin: the first message may be a system message.
        needs_answer: at least one message must be an assistant's.
    """
    given = parsed(where, given)
    if not isinstance(given, list) or not given:
        raise UserError(where, "empty" if given == [] else kind(given), "a list of messages")
    messages = [_message(f"{where}[{i}]", written, roles) for i, written in enumerate(given)]
    for i, message in enumerate(messages):
        if message["role"] == "system" and not (may_begin and i == 0):
            raise UserError(f"{where}[{i}].role", "a second system message, or one after other messages", "one, first")
    if needs_answer and all(message["role"] != "assistant" for message in messages):
        raise UserError(where, "no assistant turn", "at least one: only these are trained on")
    # In OpenAI's form a blank system message is kept: without one, some templates write their own.
    is_left_out = roles is SPEAKERS and messages[0]["role"] == "system" and not messages[0]["content"].strip()
    return messages[1:] if is_left_out else messages


def _message(at: str, written: Any, roles: Mapping[str, str]) -> Message:
    """Convert a message. ``at``: its field, ``messages[2]``. Raises ``UserError``."""
    if not isinstance(written, dict):
        raise UserError(at, kind(written), "an object with role and content")
    given = {key: value for key, value in written.items() if value is not None}
    role_key, content_key = ("from", "value") if roles is SPEAKERS and "role" not in given else ("role", "content")
    content_at = f"{at}.{content_key}"
    speaker, content = given.get(role_key), given.get(content_key)
    role = roles.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        found = f"found {speaker!r}" if isinstance(speaker, str) else kind(speaker)
        raise UserError(f"{at}.{role_key}", found, ", ".join(roles), did_you_mean(str(speaker), roles))
    message: Message = {"role": role, "content": content}
    holders = {f"{at}.{key}": given[key] for key in ("tool_calls", "function_call") if given.get(key)}
    if speaker in CALLERS and content:  # the call stands where other messages have their text
        holders[content_at], content = content, ""
    if len(holders) > 1:
        raise UserError(at, f"calls in {' and '.join(holders)}", "one of them")
    for calls_at, calls in holders.items():
        if made := _tool_calls(calls_at, calls):
            _check_answers(calls_at, "calls", role)
            message["tool_calls"] = made
    reasoning = _reasoning(at, given, role)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if given.get(key):
            message[key] = check_text(f"{at}.{key}", given[key])
    has_calls = "tool_calls" in message
    media: list[tuple[MediaKind, Reference | None]] = []
    message["content"] = "" if content is None and has_calls else _joined(content_at, content, media)
    if media:  # ``media_parts.with_media`` takes them out
        message["media"] = media
    may_be_empty = role in ("tool", "system") or has_calls or speaker in CALLERS or bool(reasoning)
    check_text(content_at, message["content"], may_be_empty)
    weight = _weight(at, given, role)
    if weight is not None:
        message["weight"] = weight
    return message


def _check_answers(where: str, what: str, role: str) -> None:
    """Raise ``UserError`` if something that only answers have is given on a turn of another ``role``."""
    if role != "assistant":
        raise UserError(where, f"{what} of the {role}", "it on assistant turns only")


def _reasoning(at: str, message: Message, role: str) -> str | None:
    """Return the reasoning of an answer, under any of its names; None if it has none. Raises ``UserError``."""
    keys = [key for key in REASONING if key in message]
    for key in keys:
        check_text(f"{at}.{key}", message[key], may_be_empty=True)
    said = {message[key]: key for key in reversed(keys) if message[key].strip()}
    if len(said) > 1:
        raise UserError(f"{at}.{keys[-1]}", f"differs from {keys[0]}", "one of them")
    for key in said.values():
        _check_answers(f"{at}.{key}", "reasoning", role)
    return next(iter(said), "" if keys and role == "assistant" else None)


def _joined(where: str, content: Any, media: list[tuple[MediaKind, Reference | None]]) -> Any:
    """Join content that is given as a list of parts; return any other content as it is. Raises ``UserError``.

    An image becomes its mark (``media_parts.MARKS``), and is added to ``media``.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for i, piece in enumerate(content):
        if isinstance(piece, dict) and piece.get("type") in TYPES:
            media.append((TYPES[piece["type"]], part_of(f"{where}[{i}]", piece)))
            texts.append(MARKS[TYPES[piece["type"]]])
            continue
        if not isinstance(piece, dict) or piece.get("type") != "text" or not isinstance(piece.get("text"), str):
            given = piece.get("type") if isinstance(piece, dict) else None
            found = f"a part of type {given!r}" if given not in (None, "text") else "not a part with text"
            expected = 'a string, or parts such as {"type": "text", "text": "..."} and {"type": "image", "path": "..."}'
            raise UserError(f"{where}[{i}]", found, expected)
        texts.append(piece["text"])
    return "".join(texts)


def _weight(at: str, message: Message, role: str) -> float | None:
    """Return the weight of an assistant turn, by ``train`` and ``weight``; None without them. Raises ``UserError``."""
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise UserError(f"{at}.train", kind(train), "true or false")
    if weight is not None:
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or (weight != 0 and not 1e-30 <= weight <= 1e30):  # outside, sums of float32 overflow
            raise UserError(f"{at}.weight", repr(weight)[:80], "0, or a number from 1e-30 to 1e30")
    if train or weight:
        _check_answers(f"{at}.{'train' if train else 'weight'}", "a weight", role)
    if role != "assistant":
        return None
    return 0.0 if train is False else None if weight is None else float(weight)


def _tool_calls(where: str, calls: Any) -> list[Message]:
    """Return tool calls as chat templates expect them: objects, with arguments parsed. Raises ``UserError``."""
    calls = parsed(where, calls)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise UserError(where, kind(calls), "a list of calls")
    return _writable(where, [_tool_call(f"{where}[{i}]", call) for i, call in enumerate(calls)])


def _tool_call(at: str, call: Any) -> Message:
    call = parsed(at, call)
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UserError(at, "no call", 'an object such as {"name": "search", "arguments": {...}}')
    known = CALL_KEYS if function is call else CALL_KEYS - {"arguments"}
    unread = [key for key in call if key not in known and not is_blank(call[key])]
    unread += [key for key in function if key not in CALL_KEYS and not is_blank(function[key])]
    if unread:
        raise UserError(f"{at}.{unread[0]}", "a key of a call that nothing reads", "a name with arguments")
    given = function.get("arguments")
    # Parsed, because templates write the arguments as JSON themselves: a JSON string would be quoted a second time.
    arguments = {} if is_blank(given) else parsed(f"{at}.arguments", given)
    if not isinstance(arguments, dict) and not is_blank(arguments):
        raise UserError(f"{at}.arguments", kind(arguments), "an object")
    arguments = arguments or {}
    made: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return made if is_blank(call.get("id")) else made | {"id": call["id"]}


def read_tools(where: str, tools: Any) -> list[Any]:
    """Return the tools that an assistant may call, as a list of objects in OpenAI's form.

    What describes a tool is only moved and never rewritten, so that a tool is the same text in both forms. Raises
    ``UserError`` if ``tools`` is neither a list of tools, nor a JSON string of one.
    """
    tools = parsed(where, tools or [])
    if not isinstance(tools, list):
        raise UserError(where, kind(tools), "a list of tools")
    made = []
    for i, tool in enumerate(tools):
        tool = parsed(f"{where}[{i}]", tool)
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}[{i}]", "no tool with a name", A_TOOL)
        if "function" not in tool:
            tool = {"function": {key: value for key, value in tool.items() if key != "type"}}
        made.append(tool if tool.get("type") else {"type": "function", **{k: tool[k] for k in tool if k != "type"}})
    return _writable(where, made)


def is_blank(value: Any) -> bool:
    """Whether a value stands for nothing: null, or an empty string, list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def read_kwargs(where: str, kwargs: Any) -> Message:
    """Return the values that a row gives to variables of the chat template; an empty dict if there are none.

    Raises ``UserError`` if ``kwargs`` is neither an object nor a JSON string of one.
    """
    kwargs = parsed(where, kwargs or {})
    if not isinstance(kwargs, dict):
        raise UserError(where, kind(kwargs), "an object")
    return _writable(where, {key: value for key, value in kwargs.items() if value is not None})


def parsed(where: str, value: Any) -> Any:
    """Parse a value if it is a string, and return any other value as it is. Raises ``UserError`` if it is not JSON.

    Datasets store tool calls as JSON strings because objects with different keys do not fit in one Arrow column. Some
    hold the JSON string of such a string.
    """
    try:
        while isinstance(value, str):
            value = parse(value)
        return value
    except RepeatedKey as error:
        raise UserError(where, error.found, error.expected) from None
    except (ValueError, RecursionError) as error:
        found = f"a string that is not JSON ({str(error).split(':')[0]})"
        raise UserError(where, found, "what json.dumps writes, or what it stands for") from None


def _writable(where: str, value: Any) -> Any:
    """Return ``value`` if a template can write it as JSON. Raises ``UserError`` if not."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        raise UserError(where, f"not JSON-serialisable ({error})") from None
    return value
