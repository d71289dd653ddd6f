"""Checks that a rendered conversation is complete. They raise ``UserError`` if a part of a message is missing."""

import json
import re
from collections.abc import Container, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from kit.data.chat.media_parts import texts_between
from kit.data.chat.messages import REASONING
from kit.data.chat.template import AS_REASONING, OTHER_TEMPLATE, Messages, Template, Tools
from kit.system.errors import UserError

THINK = re.compile("</?think>")
_OPENING_TAG, _CLOSING_TAG = r"(?:<[^<>\s/]*think[^<>\s/]*>|\[THINK\])", r"(?:</[^<>\s]*think[^<>\s]*>|\[/THINK\])"
# A content that begins with reasoning in tags: the tag, the reasoning, and what comes after it.
_BEGINS_WITH_REASONING = re.compile(rf"\s*({_OPENING_TAG})(.*?){_CLOSING_TAG}(.*)", re.IGNORECASE | re.DOTALL)
_ENDS_WITH_REASONING = re.compile(rf"{_CLOSING_TAG}\s*$", re.IGNORECASE)
# Parts that a template may leave out, for messages.
_TEXT = "leaves its text out or changes it, or leaves out a call before it"
_PART = "leaves part of the answer out, or changes it"
_NO_REASONING = "leaves the reasoning of the answer out"
WITH_TOOLS = "--chat_template with a template that supports tool calling, such as chatml or llama3"
AS_SCHEMA = 'write the parameters of tools as JSON schemas: {"type": "object", "properties": {...}}'
WITH_REASONING = (
    "--chat_template with a template that writes reasoning, or leave it out of the rows; if the template writes it "
    "in the last answer alone, --train_on assistant"
)


def reads(template: Template, name: str) -> bool:
    """Whether ``name`` occurs in a template as a word; ``enable_thinking`` is not ``thinking``."""
    return bool(re.search(rf"\b{name}\b", template.source))


def check_extras(template: Template, messages: Messages, tools: Tools, supervised: Container[int]) -> None:
    """Raise ``UserError`` if the sample has tools, calls or reasoning and the template never reads such a key.

    Reasoning counts only in the answers whose numbers are in ``supervised``.
    """
    if tools and "tools" not in template.variables:
        raise template.refusal("the template does not use tools, and some are listed", WITH_TOOLS)
    for i, message in enumerate(messages):
        if message.get("tool_calls") and "tool_calls" not in template.source:
            raise template.refusal(f"messages[{i}]: the template does not use tool_calls", WITH_TOOLS)
        if (
            i in supervised
            and message.get("reasoning_content")
            and not any(reads(template, name) for name in REASONING)
        ):
            raise template.refusal(f"messages[{i}]: the template does not use reasoning_content", WITH_REASONING)


def check_shown(
    template: Template, text: str, messages: Messages, tools: Tools, supervised: Container[int] = frozenset()
) -> None:
    """Raise ``UserError`` if ``text``, the rendering, lacks a tool, or a part of a message, in their order.

    Of an answer, the parts are its content and its calls. Its reasoning must be there only if its number is in
    ``supervised``: many templates drop earlier reasoning, at inference too.
    """
    if tools:
        without = ""
        with suppress(UserError):  # a template for tools only fails
            without = template.render(messages, None)  # the name may also occur in a call of the tool
        for function in (tool.get("function", tool) for tool in tools):
            name = function.get("name", "")
            if text.count(name) <= without.count(name):
                raise template.refusal(f"the template leaves out the tool {name!r}", WITH_TOOLS)
            for parameter in parameters(function):
                if parameter not in text and not any(form in text for form in _json_forms(parameter)):
                    found = f"the template leaves out the parameter {parameter!r} of the tool {name!r}"
                    raise template.refusal(found, AS_SCHEMA)
    at = 0
    for i, message in enumerate(messages):
        is_system = message["role"] == "system"  # some templates put it after other messages
        end = _end_of(template, text, 0 if is_system else at, message, i, i in supervised)
        at = at if is_system else end


def parameters(function: dict[str, Any]) -> list[str]:
    """The names of a tool's parameters, by a JSON schema, or by an object for each, which only some templates write."""
    given = function.get("parameters")
    if isinstance(given, dict) and ("properties" in given or isinstance(given.get("type"), str)):
        given = given.get("properties")
    return [name for name, value in given.items() if isinstance(value, dict)] if isinstance(given, dict) else []


def check_answer(template: Template, text: str, message: dict[str, Any], i: int) -> None:
    """Raise ``UserError`` if ``text``, the rendering of an answer, lacks some of its content, reasoning or calls.

    ``i`` is the number of ``message`` in the conversation.
    """
    _end_of(template, text, 0, message, i, True)


def check_inline_reasoning(
    template: Template, text: str, moved_text: str, content: str, tag: str, reasoning: str, i: int
) -> None:
    """Raise ``UserError`` if an answer's content begins with reasoning that the model would not write there.

    That is so if the template writes a reasoning block of its own before it, or reasoning in another form.

    Args:
        text: the rendering up to the answer with the number ``i``.
        moved_text: the same with this given as reasoning; empty if the template does not take it.
        content: of the answer. It begins with ``tag`` and ``reasoning``.
    """
    at = len(text)
    for _ in range(content.count(tag)):
        at = max(text.rfind(tag, 0, at), 0)
    if _ENDS_WITH_REASONING.search(text[:at]):
        found = f"messages[{i}]: the template writes a reasoning block of its own before the one in the content"
        raise template.refusal(found, AS_REASONING)
    if reasoning.strip() in moved_text and "".join(moved_text.split()) != "".join(text.split()):
        found = f"messages[{i}]: the content begins with {tag}, and the template writes reasoning in another form"
        raise template.refusal(found, AS_REASONING)


def inline_reasoning(message: dict[str, Any]) -> tuple[str, str, str] | None:
    """The tag, the reasoning and the rest of an answer whose content begins with a <think> block; else None."""
    found = _BEGINS_WITH_REASONING.match(message["content"])
    if not found or message.get("reasoning_content") or not found[2].strip():
        return None
    return found[1], found[2], found[3]


def keeps_reasoning(text: str, message: dict[str, Any]) -> bool:
    """Whether ``text`` has all reasoning of ``message``, an answer: its own, and the <think> blocks in its content."""
    *blocks, _ = THINK.split(message["content"])
    return all(block.strip() in text for block in [message.get("reasoning_content") or "", *blocks])


def _end_of(template: Template, text: str, start: int, message: dict[str, Any], i: int, is_supervised: bool) -> int:
    """Where message number ``i`` ends in ``text[start:]``. Raises ``UserError`` if it is not there; see ``_place``."""
    end, found = _place(text, start, message, is_supervised)
    if found:
        fix = WITH_REASONING if found == _NO_REASONING else OTHER_TEMPLATE
        raise template.refusal(f"messages[{i}]: the template {found}", fix)
    return end


def _place(text: str, start: int, message: dict[str, Any], is_supervised: bool) -> tuple[int, str]:
    """Where ``message`` ends in ``text[start:]``; and what the template does with it, an empty string if it is there.

    The reasoning of a masked answer need not be there.
    """
    role = message.get("role", "assistant")
    parts = texts_between(message["content"])
    if role == "assistant":
        parts = [*chain.from_iterable(map(THINK.split, parts))]
    if is_supervised:
        parts = [message.get("reasoning_content") or "", *parts]
        if text.find(parts[0].strip(), start) < 0:
            return start, _NO_REASONING
    elif role == "assistant":
        parts = parts[-1:]
    end = start
    for k, part in enumerate(parts, 1):
        forms = _json_forms(part.strip()) if role == "tool" else [part.strip()]  # some templates write results as JSON
        found = [(at, at + len(form)) for form in forms if (at := text.find(form, end)) >= 0]
        if not found:
            is_text = k == len(parts) or role != "assistant"
            return start, _NO_REASONING if not is_text else _PART if is_supervised else _TEXT
        end = min(found)[1]
    at = start
    for call in message.get("tool_calls") or []:
        name = call["function"]["name"]
        arguments = call["function"].get("arguments") or {}
        at = text.find(name, at) + len(name)
        if isinstance(arguments, dict) and arguments and str(arguments) in text:
            return start, f"does not write the arguments of {name!r} as JSON"
        leaves = [[arguments]] if isinstance(arguments, str) else map(_forms, _leaves(arguments))
        if at < len(name) or not all(any(text.find(form, start) >= 0 for form in forms) for forms in leaves):
            return start, f"leaves out the call of {name!r}, or part of it"
    return max(end, at), ""


def _leaves(arguments: Any) -> Iterator[Any]:
    """Yield the names and plain values in the arguments of a call."""
    if isinstance(arguments, dict):
        yield from arguments
        arguments = list(arguments.values())
    if isinstance(arguments, list):
        for value in arguments:
            yield from _leaves(value)
    elif arguments is not None:
        yield arguments


def _forms(value: Any) -> list[str]:
    """How templates write a plain value: as JSON, as Python, as it is."""
    if isinstance(value, str):
        return [*_json_forms(value.strip()), repr(value)[1:-1]]
    return [str(value), json.dumps(value)]


def _json_forms(text: str) -> list[str]:
    return [text, *(json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))]
