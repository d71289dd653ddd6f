"""Tool calls in answers: read from text, in the form in which the chat template writes them.

Promises: the form is known before the model is loaded, because it reads back a call that the template wrote. It is
never guessed from an answer, and nothing in an answer is executed.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

from kit.data.chat.template import Jinja
from kit.data.chat.turns import Drafters
from kit.data.strict_json import decode, parse
from kit.rollouts.generation import text_of
from kit.system.errors import UserError


class ToolCall(NamedTuple):
    """A call, as the model wrote it: the tool may be unknown, and the arguments may not fit it."""

    name: str
    arguments: dict[str, Any]  # JSON values


def turn_of(calls: Sequence[ToolCall], ids: Sequence[str], text: str = "") -> dict[str, Any]:
    """Return a turn of the model as a message, with the ids of its calls."""
    made = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}, "id": call_id}
        for call, call_id in zip(calls, ids, strict=True)
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})


def result_of(call: ToolCall, call_id: str, content: str) -> dict[str, Any]:
    """Return the result of a call as a message, or the error that the model reads in its place."""
    return {"role": "tool", "content": content, "name": call.name, "tool_call_id": call_id}


class MalformedCall(ValueError):
    """A call begins, and it is not one: JSON that ends early, no name, arguments that are no object."""


class _Form(NamedTuple):
    """How a call is written, as regular expressions."""

    mark: str  # with which a call begins, and no text
    head: str  # from there to the arguments, with their name; without a name, to JSON that has both
    tail: str  # after them; or nothing at the end, because ``text_of`` leaves out the token that ended the answer
    argument: str = ""  # name and value of one, which is JSON or else text; empty: all of them are JSON


_FORMS = (
    _Form("<tool_call>", r"\s*", r"\s*(?:</tool_call>|\Z)"),  # Hermes, Qwen
    _Form(  # Qwen3-Coder, Nemotron 3
        "<tool_call>",
        r"\s*<function=(?P<name>[^>\s]+)>",
        r"\s*</function>\s*(?:</tool_call>|\Z)",
        r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>",
    ),
    _Form(  # GLM
        "<tool_call>",
        r"\s*(?P<name>[^<\s]+)",
        r"\s*(?:</tool_call>|\Z)",
        r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    ),
    _Form(r"\[TOOL_CALLS\]", r"\s*(?:(?P<name>[^\s\[{]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*)?", ""),  # Mistral
    _Form(r"<\|tool_call\|>", r"\s*", r"\s*(?:<\|/tool_call\|>|\Z)"),  # Phi-4-mini, Granite
    _Form(  # gpt-oss
        r"(?:\A|<\|start\|>assistant|<\|channel\|>\w+)\s*to=functions\.",
        r"(?P<name>[\w.-]+)[^{]*<\|message\|>\s*",
        r"\s*(?:<\|call\|>|\Z)",
    ),
    _Form(  # Llama 3, plain JSON: nothing marks them but that they are the whole answer
        r"(?:\A|(?<=;))\s*(?:<\|python_tag\|>|(?=\[?\s*{\s*\"(?:name|type)\"))", r"\s*", r"\s*(?:;|\Z)"
    ),
)
_THINKING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_PROBE = ToolCall("probe_call", {"where": 'north of "Oslo"', "count": 3})
_SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}, "count": {"type": "integer"}}}
_TOOL = {"type": "function", "function": {"name": _PROBE.name, "description": "A probe.", "parameters": _SCHEMA}}


class CallReader:
    """Reads the calls of answers in one form."""

    def __init__(self, tokenizer: Any, form: _Form | None) -> None:
        """
        Args:
            form: None: that of the tokenizer's ``response_template``.
        """
        self._tokenizer, self._form = tokenizer, form

    def read(self, prompt: str, answer: str) -> list[ToolCall]:
        """Return the calls of an answer, in their order; the text beside them, and reasoning, are passed over.

        Args:
            prompt: with its special tokens, because a template may begin the answer: ``<think>``.
            answer: with its special tokens, see ``text_of``.

        Raises:
            MalformedCall: one of them is none.
        """
        if self._form is None:
            try:
                message = self._tokenizer.parse_response(answer, prefix=prompt)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise MalformedCall(str(error)) from None
            return _calls(message.get("tool_calls", []))
        for opening, closing in _THINKING.items():
            if prompt.rstrip().endswith(opening) or answer.lstrip().startswith(opening):
                answer = answer.partition(closing)[2]
        found: list[ToolCall] = []
        mark, head, tail, argument = (re.compile(each, re.DOTALL) for each in self._form)
        at = 0
        while begin := mark.search(answer, at):
            if not (opened := head.match(answer, begin.end())):
                raise MalformedCall(f"no call: {answer[begin.start() :][:60]!r}")
            name, at = opened.groupdict().get("name"), opened.end()
            value: Any = {}
            if argument.pattern:
                while pair := argument.match(answer, at):
                    value[pair[1]], at = _json_or_text(pair[2]), pair.end()
            else:
                try:
                    value, at = decode(answer, at)
                except (ValueError, RecursionError) as error:
                    raise MalformedCall(f"no JSON: {error}") from None
            if not (closed := tail.match(answer, at)):
                raise MalformedCall(f"a call does not end: {answer[begin.start() :][:60]!r}")
            at = closed.end()
            found += _calls({"name": name, "arguments": value} if name else value)
        return found

    def equal(self, prompt: str, expected: str, answer: str) -> float:
        """Return 1 if the calls of two answers are equal as JSON, in their order, else 0; NaN if neither has any."""
        wanted = self.read(prompt, expected)
        try:
            found = self.read(prompt, answer)
            return float(_comparable(found) == _comparable(wanted)) if found or wanted else float("nan")
        except (MalformedCall, RecursionError):  # lists in lists, deeper than Python compares
            return 0.0


def call_reader(tokenizer: Any, template: Jinja) -> CallReader:
    """Return what reads calls as ``template`` writes them: in the first form that reads one back as it was written.

    The forms are the tokenizer's ``response_template``, if it has one, and those of ``_FORMS``.

    Raises:
        UserError: there is none.
    """
    forms = [None] if getattr(tokenizer, "response_template", None) else []
    written = _written(tokenizer, template)
    for reader in (CallReader(tokenizer, form) for form in (*forms, *_FORMS)):
        with suppress(MalformedCall):
            if written and reader.read(*written) == [_PROBE]:
                return reader
    found = f"writes a call in an unknown form: {written[1][:80]!r}" if written else "writes no call"
    fix = "--chat_template chatml or llama3, or a response_template in tokenizer_config.json"
    raise UserError("chat_template", f"the template {found}", "a form of calls that can be read back", fix)


def _written(tokenizer: Any, template: Jinja) -> tuple[str, str] | None:
    """The prompt, and the answer that calls, as the template writes ``_PROBE``; None if it does not."""
    asked, calling = {"role": "user", "content": "Probe."}, turn_of([_PROBE], ["probe0001"])
    # Some templates need reasoning in the block that they open; some write calls, and no tools, or not here.
    for tools, reasoning in product(([_TOOL], None), ({}, {"reasoning_content": "A probe."})):
        with suppress(UserError):
            _, drafter = Drafters(template, tokenizer, "last").of(bool(tools), {})
            draft = drafter.drafts([asked, calling | reasoning], 0, tools)[-1]
            start, end = draft.spans[0][0], draft.spans[-1][1]
            ids = tokenizer(draft.text[start:end], add_special_tokens=False).input_ids
            return draft.text[:start], text_of(tokenizer, ids)
    return None


def _calls(value: Any) -> list[ToolCall]:
    """The calls in JSON: an object, or a list of them. Raises ``MalformedCall``."""
    found = []
    for each in value if isinstance(value, list) else [value]:
        match each:
            case (
                {"name": str(name), "arguments": dict(arguments)}
                | {"name": str(name), "parameters": dict(arguments)}
                | {"function": {"name": str(name), "arguments": dict(arguments)}}
            ):
                found.append(ToolCall(name, arguments))
            case _:
                raise MalformedCall("no name with an object of arguments")
    return found


def _json_or_text(value: str) -> Any:
    try:
        return parse(value)
    except (ValueError, RecursionError):
        return value


def _comparable(value: Any) -> Any:
    """A value that equals another as JSON does: Python takes true for 1."""
    if isinstance(value, Mapping):
        return {key: _comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    return isinstance(value, bool), value
