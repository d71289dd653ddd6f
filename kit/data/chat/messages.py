"""Converts the messages of a conversation, in OpenAI's or ShareGPT's form, to messages in the kit's form. Pure.

``kit.data.chat.formats`` describes the kit's form. Problems are added to a list; ``Problem.where`` is the field, such
as ``messages[2].role``. Functions that raise ``UserError`` say so.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kit.data.strict_json import RepeatedKey, parse
from kit.errors import Problem, Problems, UserError, did_you_mean, kind, raise_if

CALLERS = ("function_call", "tool_call")  # roles of turns whose text is a call: of ShareGPT, and of ms-swift
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "developer": "system",
    "function": "tool",
    "tool_response": "tool",
    **dict.fromkeys(CALLERS, "assistant"),
}
# The names of an answer's reasoning: transformers' own, gpt-oss's, and that of several APIs.
REASONING = ("reasoning_content", "thinking", "reasoning")
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
# The names of a call's arguments: OpenAI's, Llama's, LangChain's and Anthropic's.
ARGUMENTS = ("arguments", "parameters", "args", "input")
# The names of a call's id. Where OpenAI's Responses API gives two, results refer to ``call_id``.
IDS = ("tool_call_id", "call_id", "id")
# The keys of a call, and of its function, that are read or say nothing: its number in a list, the state of an answer.
CALL_KEYS = frozenset((*IDS, "function", "type", "index", "status"))
FUNCTION_KEYS = frozenset((*ARGUMENTS, "name"))
# The names of the JSON schema of a tool's parameters: OpenAI's, Anthropic's and that of MCP.
SCHEMAS = ("parameters", "input_schema", "inputSchema")
A_TOOL = 'an object such as {"type": "function", "function": {"name": "search", "parameters": {...}}}'
# Space, control characters, what Unicode calls default ignorable code points, and the blank of Braille: text of nothing
# else looks empty.
INVISIBLE = re.compile(
    "[\\s\0-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]*"
)
Message = dict[str, Any]


def check_text(where: str, value: Any, may_be_empty: bool = False) -> list[Problem]:
    """The problem of a value that is no string, is blank, or cannot be encoded as UTF-8; empty if there is none.

    ``may_be_empty``: spaces, or nothing, stand for no text. Invisible characters never do: they would be learned.
    """
    if not isinstance(value, str):
        return [Problem(where, kind(value), "a string")]
    if INVISIBLE.fullmatch(value) and (value.strip() or not may_be_empty):
        found = f"only invisible characters (U+{ord(value.strip()[0]):04X})" if value.strip() else "empty"
        return [Problem(where, found, "text")]
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return [Problem(where, f"half of a surrogate pair at character {error.start}", "valid Unicode")]
    return []


def read_messages(
    where: str,
    given: Any,
    problems: Problems,
    roles: Mapping[str, str] = ROLES,
    may_begin: bool = True,
    needs_answer: bool = True,
) -> list[Message]:
    """Convert a list of messages to our form. What is wrong is added to ``problems``; then the result is incomplete.

    Args:
        where: the field that holds the messages, for messages to the user.
        given: the value of that field, of any type.
        roles: the names that roles may have, each with our role. With ``SPEAKERS``, messages may also have ``from``
            and ``value`` instead of ``role`` and ``content``.
        may_begin: the first message may be a system message.
        needs_answer: at least one message must be an assistant's.
    """
    if not isinstance(given, list):
        problems.append(Problem(where, kind(given), "a list of messages"))
        return []
    if not given:
        problems.append(Problem(where, "empty", "a list of messages"))
        return []
    num_problems = len(problems)
    messages = []
    for i, message in enumerate(given):
        messages.append(_plain(message, roles) or _message(f"{where}[{i}]", message, roles, problems))
    for i, message in enumerate(messages):
        if message.get("role") == "system" and not (may_begin and i == 0):
            is_second = may_begin and messages[0].get("role") == "system"
            found = "a second system message" if is_second else "a system message behind others"
            problems.append(Problem(f"{where}[{i}].role", found, "one, first"))
    if needs_answer and len(problems) == num_problems and all(message["role"] != "assistant" for message in messages):
        problems.append(Problem(where, "no assistant turn", "at least one: nothing else is learned"))
    return messages


def _plain(message: Any, roles: Mapping[str, str]) -> Message | None:
    """Convert a message with a known role, text, and nothing else. Returns None for any other.

    Nearly all messages are like that, and this is faster than ``_message``.
    """
    if type(message) is not dict or len(message) != 2:
        return None
    if "role" in message:
        speaker, content = message["role"], message.get("content")
    elif roles is SPEAKERS:
        speaker, content = message.get("from"), message.get("value")
    else:
        return None
    if type(speaker) is not str or speaker in CALLERS or type(content) is not str:
        return None
    role = roles.get(speaker)
    if not role or check_text("", content):
        return None
    return {"role": role, "content": content}


def _message(at: str, given: Any, roles: Mapping[str, str], problems: Problems) -> Message:
    """Convert any message. What is wrong with it is added to ``problems``. ``at``: its field, ``messages[2]``."""
    if not isinstance(given, dict):
        problems.append(Problem(at, kind(given), "an object with role and content"))
        return {}
    written = given
    given = {key: value for key, value in written.items() if value is not None}
    is_sharegpt = roles is SPEAKERS and "role" not in given
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    content_at = f"{at}.{content_key}"
    calls_at = f"{at}.tool_calls"
    speaker = given.get(role_key)
    content = given.get(content_key)
    calls = given.get("tool_calls")
    role = roles.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        if isinstance(speaker, str):
            found = f"found {speaker!r}"
        else:
            found = kind(speaker) if role_key in written else "missing"
        problems.append(Problem(f"{at}.{role_key}", found, ", ".join(roles), did_you_mean(str(speaker), roles)))
    message: Message = {"role": role, "content": content}
    if speaker in CALLERS and content:  # the call stands where other messages have their text
        calls, calls_at = content, content_at
        content = None
    if given.get("function_call"):  # the older name of OpenAI, for a single call
        if calls:
            problems.append(Problem(f"{at}.function_call", "given beside tool_calls", "one of them"))
        calls, calls_at = given["function_call"], f"{at}.function_call"
    if calls:
        with problems.caught():
            calls = _tool_calls(calls_at, calls)
            if calls and role not in ("assistant", None):
                raise UserError(Problem(calls_at, f"calls of the {role}", "them on assistant turns only"))
    if calls:
        message["tool_calls"] = calls
    with problems.caught():
        reasoning = _reasoning(at, given, role)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if given.get(key):
            message[key] = given[key]
            problems += check_text(f"{at}.{key}", given[key])
    with problems.caught():
        content = _joined(content_at, content)
        message["content"] = "" if content is None and calls else content
        may_be_empty = bool(role == "tool" or calls or message.get("reasoning_content"))
        if message["content"] is None and content_key not in written:
            problems.append(Problem(content_at, "missing", "a string"))
        else:
            problems += check_text(content_at, message["content"], may_be_empty)
        weight = _weight(at, given, role)
        if weight is not None:
            message["weight"] = weight
    return message


def _reasoning(at: str, message: Message, role: str | None) -> str | None:
    """Return the reasoning of an answer, under any of its names; None if it has none. Raises ``UserError``."""
    keys = [key for key in REASONING if key in message]
    if not keys:
        return None
    for key in keys:
        raise_if(check_text(f"{at}.{key}", message[key], may_be_empty=True))
    first, *others = [key for key in keys if message[key].strip()] or keys[:1]
    for key in others:
        if message[key] != message[first]:
            raise UserError(Problem(f"{at}.{key}", f"differs from {first}", "one of them"))
    if role in ("assistant", None):
        return message[first]
    if message[first].strip():
        raise UserError(Problem(f"{at}.{first}", f"reasoning of the {role}", "it on assistant turns only"))
    return None


def _joined(where: str, content: Any) -> Any:
    """Join content that is given as a list of text parts; return any other content as it is. Raises ``UserError``."""
    if not isinstance(content, list):
        return content
    for i, piece in enumerate(content):
        if not isinstance(piece, dict) or piece.get("type") != "text" or not isinstance(piece.get("text"), str):
            given = piece.get("type") if isinstance(piece, dict) else None
            found = f"a part of type {given!r}" if given not in (None, "text") else "not a part with text"
            raise UserError(
                Problem(f"{where}[{i}]", found, 'a string, or parts such as {"type": "text", "text": "..."}')
            )
    return "".join(piece["text"] for piece in content)


def _weight(at: str, message: Message, role: str | None) -> float | None:
    """Return the weight of an assistant turn, by ``train`` and ``weight``; None without them. Raises ``UserError``."""
    train = message.get("train")
    weight = message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise UserError(Problem(f"{at}.train", kind(train), "true or false"))
    if weight is not None:
        where = f"{at}.weight"
        expected = "0, or a number from 1e-30 to 1e30"
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(Problem(where, kind(weight), expected))
        if weight != 0 and not 1e-30 <= weight <= 1e30:  # outside, sums of float32 under- or overflow
            found = f"{weight:g}" if isinstance(weight, float) else f"{weight}"[:20]
            raise UserError(Problem(where, found, expected))
    if role == "assistant":
        if train is False:
            return 0.0
        return None if weight is None else float(weight)
    if role and (train or weight):
        key, value = ("train", "true") if train else ("weight", f"{weight:g}")
        found = f"{value} on a turn of the {role}"
        raise UserError(Problem(f"{at}.{key}", found, "it on assistant turns: only these are learned from"))
    return None


def _tool_calls(where: str, calls: Any) -> list[Message]:
    """Return tool calls as chat templates expect them: objects, with arguments parsed. Raises ``UserError``."""
    calls = _parsed(where, calls)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise UserError(Problem(where, kind(calls), "a list of calls"))
    return _writable(where, [_tool_call(f"{where}[{i}]", call) for i, call in enumerate(calls)])


def _tool_call(at: str, call: Any) -> Message:
    call = _parsed(at, call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UserError(Problem(at, "no call", 'an object such as {"name": "search", "arguments": {...}}'))
    # Parsed, because templates write the arguments as JSON themselves: a JSON string would be quoted a second time.
    given = {key: _parsed(f"{at}.{key}", function[key]) for key in ARGUMENTS if not _is_blank(function.get(key))}
    given = {key: value for key, value in given.items() if not _is_blank(value)}  # such as the string "{}"
    arguments = _one_of(at, given) if given else {}
    if not isinstance(arguments, dict):
        raise UserError(Problem(f"{at}.{next(iter(given))}", kind(arguments), "an object"))
    ids = [call[key] for key in IDS if not _is_blank(call.get(key))]
    made: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return made | {"id": ids[0]} if ids else made


def unread_call_keys(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of a message's calls that nothing reads, each with its value. The message may have any form.

    A key is named with the key of the message that holds the calls: ``tool_calls.result``.
    """
    holders = ["tool_calls", "function_call"]
    if message.get("role", message.get("from")) in CALLERS:
        holders.append("content" if "role" in message else "value")
    for holder in holders:
        try:
            calls = _parsed("", message.get(holder) or [])
            for call in calls if isinstance(calls, list) else [calls]:
                call = _parsed("", call)
                if not isinstance(call, dict):
                    continue
                function = call.get("function")
                parts = [(call, CALL_KEYS | FUNCTION_KEYS)]
                if isinstance(function, dict):
                    parts = [(call, CALL_KEYS), (function, FUNCTION_KEYS)]
                for part, read in parts:
                    for key in sorted(part.keys() - read):
                        yield f"{holder}.{key}", part[key]
        except UserError:  # reading the calls reports it
            pass


def read_tools(where: str, tools: Any) -> list[Any]:
    """Return the tools that an assistant may call, as a list of objects in OpenAI's form; a JSON string is parsed.

    Raises ``UserError`` if ``tools`` is neither a list of such objects, nor a JSON string of one.
    """
    tools = _parsed(where, tools or [])
    if not isinstance(tools, list):
        raise UserError(Problem(where, kind(tools), "a list of tools"))
    return _writable(where, [_tool(f"{where}[{i}]", tool) for i, tool in enumerate(tools)])


def _tool(at: str, tool: Any) -> Message:
    """Return a tool in OpenAI's form, which chat templates expect. One in that form is returned as it is.

    What describes a tool is only moved and never rewritten, so that a tool is the same text in both forms.
    """
    tool = _parsed(at, tool)
    if not isinstance(tool, dict):
        raise UserError(Problem(at, kind(tool), "an object"))
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        raise UserError(Problem(f"{at}.function", kind(function), "an object with a name"))
    name = function.get("name")
    if not isinstance(name, str) or not name:
        found = "empty" if name == "" else kind(name) if "name" in function else "missing"
        raise UserError(Problem(f"{at}.name", found, f"a string, in {A_TOOL}"))
    if "function" in tool:
        return tool if tool.get("type") else {"type": "function"} | {k: v for k, v in tool.items() if k != "type"}
    if "parameter_definitions" in tool:  # Cohere's form, which only its own templates read, and as it is
        return tool
    if tool.get("type") not in (None, "function", "custom"):  # of OpenAI's Responses API, and of Anthropic
        raise UserError(Problem(f"{at}.type", f"a tool of type {tool['type']!r}"[:80], A_TOOL))
    made: Message = {}
    for key, value in tool.items():
        if key in SCHEMAS:
            made["parameters"] = _one_of(at, {key: tool[key] for key in SCHEMAS if not _is_blank(tool.get(key))})
        elif key != "type":
            made[key] = value
    return {"type": "function", "function": made}


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _one_of(at: str, given: Mapping[str, Any]) -> Any:
    """The one value that is given under several keys; None if there is no key. Raises ``UserError`` if they differ."""
    first = next(iter(given), "")
    for key, value in given.items():
        if value != given[first]:
            raise UserError(Problem(f"{at}.{key}", f"differs from {first}", "one of them"))
    return given.get(first)


def read_kwargs(where: str, kwargs: Any) -> Message:
    """Return the values that a row gives to variables of the chat template; an empty dict if there are none.

    Raises ``UserError`` if ``kwargs`` is neither an object nor a JSON string of one.
    """
    kwargs = _parsed(where, kwargs or {})
    if not isinstance(kwargs, dict):
        raise UserError(Problem(where, kind(kwargs), "an object"))
    return _writable(where, {key: value for key, value in kwargs.items() if value is not None})


def _parsed(where: str, value: Any) -> Any:
    """Parse a value if it is a string, and return any other value as it is. Raises ``UserError`` if it is not JSON.

    Data sets store tool calls as JSON strings because objects with different keys do not fit in one Arrow column. Some
    hold the JSON string of such a string.
    """
    try:
        while isinstance(value, str):
            value = parse(value)
        return value
    except RepeatedKey as error:
        raise UserError(Problem(where, error.found, error.expected)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            Problem(where, f"not JSON ({str(error).split(':')[0]})", "a JSON string, or what it stands for")
        ) from None


def _writable(where: str, value: Any) -> Any:
    """Return ``value`` if a template can write it as JSON. Raises ``UserError`` if not."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        raise UserError(Problem(where, f"nothing that JSON can hold ({error})")) from None
    return value
