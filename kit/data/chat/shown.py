"""Checks that a rendered conversation leaves out nothing that its messages say. They raise ``UserError`` if it does."""

import json
import re
from contextlib import suppress
from typing import Any

from kit.data.chat.messages import REASONING
from kit.data.chat.template import Messages, Template, Tools
from kit.errors import UserError

THINK = re.compile("</?think>")


def reads(template: Template, name: str) -> bool:
    """Whether ``name`` occurs in a template as a word; ``enable_thinking`` is not ``thinking``."""
    return bool(re.search(rf"\b{name}\b", template.source))


def check_extras(template: Template, messages: Messages, tools: Tools) -> None:
    """Raise ``UserError`` if the sample has tools, calls or reasoning and the template never reads such a key."""
    if tools and "tools" not in template.variables:
        raise template.refusal("the template knows no tools, and this sample lists some")
    for i, message in enumerate(messages):
        if message.get("tool_calls") and "tool_calls" not in template.source:
            raise template.refusal(f"messages[{i}]: the template knows no tool_calls")
        if message.get("reasoning_content") and not any(reads(template, name) for name in REASONING):
            found = f"messages[{i}]: the template knows no reasoning_content"
            raise template.refusal(found)


def check_shown(template: Template, text: str, messages: Messages, tools: Tools) -> None:
    """Raise ``UserError`` if ``text``, the rendering, lacks a tool or the content of a message, in their order.

    Of an answer only the part after its reasoning must be there: many templates drop earlier reasoning.
    """
    if tools:
        without = ""
        with suppress(UserError):  # a template for tools only fails
            without = template.render(messages, None)  # the name may also occur in a call of the tool
        for name in (tool.get("function", tool).get("name", "") for tool in tools):
            if text.count(name) <= without.count(name):
                raise template.refusal(f"the template leaves out the tool {name!r}")
    at = 0
    for i, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "assistant":
            content = THINK.split(content)[-1]
        forms = [content.strip()]
        start = 0 if message["role"] == "system" else at  # some templates put it after other messages
        if message["role"] == "tool":  # some templates write it as a JSON string
            forms += [json.dumps(forms[0], ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)]
        found = []
        for form in forms:
            start_of_form = text.find(form, start)
            if start_of_form >= 0:
                found.append((start_of_form, form))
        if not found:
            raise template.refusal(f"messages[{i}]: the template leaves its text out, or changes it")
        if message["role"] != "system":
            start_of_form, form = min(found)
            at = start_of_form + len(form)


def check_answer(template: Template, text: str, message: dict[str, Any], i: int) -> None:
    """Raise ``UserError`` if ``text``, the rendering of an answer, lacks some of its content, reasoning or calls.

    ``i`` is the number of ``message`` in the conversation.
    """
    reasoning = (message.get("reasoning_content") or "").strip()
    if reasoning not in text:
        raise template.refusal(f"messages[{i}]: the template leaves the reasoning of the answer out")
    at = 0
    for part in [reasoning, *THINK.split(message["content"])]:
        at = text.find(part.strip(), at) + len(part.strip())
        if at < len(part.strip()):
            raise template.refusal(f"messages[{i}]: the template leaves part of the answer out, or changes it")
    at = 0
    for call in message.get("tool_calls") or []:
        name = call["function"]["name"]
        arguments = call["function"].get("arguments") or {}
        at = text.find(name, at) + len(name)
        if isinstance(arguments, dict) and arguments and str(arguments) in text:
            raise template.refusal(f"messages[{i}]: the template does not write the arguments of {name!r} as JSON")
        parts = [arguments] if isinstance(arguments, str) else arguments
        are_shown = all(part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text for part in parts)
        if at < len(name) or not are_shown:
            raise template.refusal(f"messages[{i}]: the template leaves out the call of {name!r}, or part of it")
