"""Fixes for a conversation that a chat template refuses.

Promise: a fix that a message names was tried on the whole conversation, and with it nothing of the conversation is
lost; of many rows of a kind, on the first fifty of a block. If none works, the message says so.
"""

import copy
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from kit.data.chat.answers import OPEN_THOUGHT
from kit.data.chat.messages import REASONING
from kit.data.chat.shipped import SHIPPED, can_be_added, new_tokens_flag
from kit.data.chat.shown import parameters
from kit.data.chat.stops import Stops
from kit.data.chat.template import Messages, Template, Tools
from kit.data.chat.turns import Draft, Drafter, TrainOn
from kit.errors import Problem, UserError

SWITCH = (False, True)  # values to try of a variable for thinking
EFFORTS = ("none", "low", "high")  # and of one that says how much
MAX_SAME = 50  # conversations in a block of rows for which the same fix must work, until it is taken to work for all
MAX_TRIALS = 10  # conversations for which all fixes of a kind of problem are tried; later only those that have helped

# What opens a thought, and the replacements that make its closing tag: <think>, [THINK], <|START_THINKING|>.
_OPENING_TAG = re.compile(
    r"[<\[\u25c1]\|?(?:\w+:)?(?:START_|BEGIN_)?(?:think|thinking|thoughts?|reasoning)(?:_start|_begin)?\|?[>\]\u25b7]",
    re.IGNORECASE,
)
_CLOSINGS = (("START", "END"), ("BEGIN", "END"), ("_start", "_end"), ("_begin", "_end"))
_ANEW = " (another format than the model's own, which it learns anew)"
_SOURCES = [one.source for one in SHIPPED.values()]
_PROBE = "Let me think."
Tags = tuple[str, str]  # what opens and closes a thought


@dataclass(frozen=True, slots=True)
class _Row:
    """A conversation, and how it is learned from. A fix changes one of its fields, or several."""

    messages: Messages
    tools: Tools
    template: Template
    stops: Stops
    train_on: TrainOn

    def with_answers(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> "_Row":
        """Return the row with each answer changed."""
        messages = [change(message) if message["role"] == "assistant" else message for message in self.messages]
        return replace(self, messages=messages)


class Fixes:
    """Finds fixes for conversations that are refused. Few are tried for each once it is known which of them help."""

    def __init__(self, tokenizer: Any, train_on: TrainOn) -> None:
        self._tokenizer = tokenizer
        self._stops = Stops(tokenizer)
        self._train_on = train_on
        self._helped: dict[str, dict[str, str]] = {}  # by kind of problem: the fixes that have worked, as reported
        self._num_tried: dict[str, int] = {}  # by kind of problem: for how many conversations all were tried
        self._num_worked: dict[str, int] = {}  # by kind of problem: for how many conversations a fix has worked
        self._none: dict[str, str] = {}  # by kind of problem: that none works, as it was first reported

    def added(
        self,
        problem: Problem,
        template: Template | None,
        messages: Messages,
        first: int,
        tools: Tools,
        kwargs: Mapping[str, Any],
    ) -> Problem:
        """Return ``problem``, for which a conversation is refused, with a fix that works or that there is none.

        Args:
            template: the one that refuses it; None if there is none.
            kwargs: values that the row gives to variables of the template.
        """
        if problem.where != "chat_template":
            return problem
        kind = re.split("[('\"]", re.sub(r"\d+", "", problem.found))[0]
        num_tried = self._num_tried[kind] = self._num_tried.get(kind, 0) + 1
        helped = self._helped.setdefault(kind, {})
        if num_tried > MAX_TRIALS and not helped:
            return replace(problem, fix=self._none[kind])
        if num_tried > MAX_SAME and len(helped) == 1 and self._num_worked[kind] == num_tried - 1:
            self._num_worked[kind] += 1
            return replace(problem, fix=next(iter(helped.values())))
        rows = self._candidates(template, messages, tools, kwargs)
        if num_tried > MAX_TRIALS:
            working = (name for name, row in rows if name in helped and self._works(row, first))
            if not (name := next(working, "")):
                return problem
            self._num_worked[kind] = self._num_worked.get(kind, 0) + 1
            return replace(problem, fix=helped[name])
        candidates = dict(rows)
        working = (name for name, row in candidates.items() if self._works(row, first))
        name = next(working, "")
        if name in SHIPPED:  # a user may choose one
            fix = f"--chat_template {' | '.join([name, *(other for other in working if other in SHIPPED)])}"
        elif name:
            fix = name
        else:
            names = (f"--chat_template {name}" if name in SHIPPED else name for name in candidates)
            tried = dict.fromkeys(re.sub("=.*|, and add .*| \\(another .*", "", name) for name in names)
            fix = f"none of these works: {'; '.join(tried)}" if tried else "no fix is known"
            fix = self._none.setdefault(kind, fix + "; it takes another template, or other rows")
            return replace(problem, fix=fix)
        helped[name] = fix
        self._num_worked[kind] = self._num_worked.get(kind, 0) + 1
        return replace(problem, fix=fix)

    def _works(self, row: _Row, first: int) -> bool:
        """Whether nothing of the row is lost when it is encoded, and what is learned is what the model shall write."""
        try:
            drafts = Drafter(row.template, row.stops, row.train_on).drafts(row.messages, first, row.tools)
        except UserError:
            return False
        return all(_is_sound(draft, row.messages) for draft in drafts)

    def _candidates(
        self, template: Template | None, messages: Messages, tools: Tools, kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, _Row]]:
        """Yield fixes, as a message names them, and the row to which each has been applied.

        They are ordered by what they change: settings first, what is lost last.
        """
        if template is not None:
            row = _Row(messages, tools, template, self._stops, self._train_on)
            yield from _schemas(row)
            yield from self._values(row, kwargs)
            yield from self._thoughts(row, kwargs)
            yield from self._learned(row)
            yield from self._ends(row)
        source = "" if template is None else template.source
        others = []
        for name, shipped in self._shipped:
            # Another template than its own is little for a chat model, unless it has the same tokens.
            own = [token for token in SHIPPED[name].tokens if token not in ("bos_token", "eos_token")]
            with_it = _Row(messages, tools, shipped, self._stops, self._train_on)
            if not source or source in _SOURCES or (own and all(token in source for token in own)):
                yield name, with_it
            else:
                others.append((f"--chat_template {name}{_ANEW}", with_it))
        for name, shipped, missing in self._with_new_tokens:
            fix = f"--chat_template {name} {new_tokens_flag(self._tokenizer, missing)}"
            with_it = _Row(messages, tools, shipped, self._stops.with_tokens(missing), self._train_on)
            if not source or source in _SOURCES:
                yield fix, with_it
            else:
                others.append((f"{fix}{_ANEW}", with_it))
        if template is not None:
            yield from self._without(row)
        if tools or any(message.get("tool_calls") for message in messages):
            yield from others

    def _values(self, row: _Row, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, _Row]]:
        """Give the variables of a template other values; those that the row gives stay."""
        for name in sorted(name for name in row.template.variables if re.search("think|reason", name)):
            for value in EFFORTS if "effort" in name else SWITCH:
                if name not in kwargs:
                    shown = value if isinstance(value, str) else str(value).lower()
                    with suppress(UserError):  # the tokenizer gives the variable
                        template = row.template.with_values({name: value})
                        yield (
                            f"--chat_template_kwargs {shlex.quote(f'{name}={shown}')}",
                            replace(row, template=template),
                        )

    def _thoughts(self, row: _Row, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, _Row]]:
        """Put the reasoning of answers into their content, or the other way round."""
        answers = [message for message in row.messages if message["role"] == "assistant"]
        changes: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = []
        for tags in _tags_in(" ".join(answer["content"] for answer in answers)):
            fix = f"write what is between {tags[0]} and {tags[1]} into reasoning_content"
            changes.append((fix, partial(_into_reasoning, tags=tags)))
        for tags in self._tags(row.template):
            if any(answer.get("reasoning_content") for answer in answers):
                fix = f"write the reasoning into the content, as {tags[0]}...{tags[1]}"
                changes.append((fix, partial(_into_content, tags=tags)))
            if tags[0] in row.template.source and any(_lacks_thought(answer, tags) for answer in answers):
                fix = f"begin each content that has no thought with {tags[0]}{tags[1]}"
                changes.append((fix, partial(_with_empty_thought, tags=tags)))
        for fix, change in changes:
            changed = row.with_answers(change)
            yield fix, changed
            for value, both in self._values(changed, kwargs):
                if value.endswith("=true"):
                    yield f"{fix}, and add {value}", both

    def _learned(self, row: _Row) -> Iterator[tuple[str, _Row]]:
        """Learn from less."""
        roles = [message["role"] for message in row.messages]
        if "assistant" in roles and "user" not in roles[: roles.index("assistant")]:
            i = roles.index("assistant")
            messages = [*row.messages[:i], {**row.messages[i], "weight": 0.0}, *row.messages[i + 1 :]]
            yield 'give the first answer "train": false, and it is only read', replace(row, messages=messages)
        if row.train_on == "all":
            yield "--train_on assistant", replace(row, train_on="assistant")

    def _ends(self, row: _Row) -> Iterator[tuple[str, _Row]]:
        """Take the token that the template writes behind an answer for the tokenizer's EOS."""
        with suppress(UserError):
            text = row.template.render(row.messages, None)
            contents = [message["content"].strip() for message in row.messages if message["role"] == "assistant"]
            content = contents[-1] if contents else ""
            behind = text.rpartition(content)[2].lstrip() if content and content in text else ""
            token = next((token for token in row.stops.special if behind.startswith(token)), "")
            if token and token != row.stops.eos:
                stops = copy.copy(row.stops)
                stops.eos = token
                yield f"name {token} as eos_token in tokenizer_config.json", replace(row, stops=stops)

    def _without(self, row: _Row) -> Iterator[tuple[str, _Row]]:
        """Leave something out."""
        if any(message.get("reasoning_content") for message in row.messages):
            yield "leave the reasoning out", row.with_answers(lambda answer: answer | {"reasoning_content": None})
        if row.tools and not any(message["role"] == "tool" or message.get("tool_calls") for message in row.messages):
            yield "leave the tools out, which no answer calls", replace(row, tools=None)

    def _tags(self, template: Template) -> list[Tags]:
        """The tags of thoughts that the template or the tokenizer has; <think> if the template writes no reasoning."""
        tags = list(dict.fromkeys(_tags_in(template.source + " ".join(sorted(self._stops.all)))))
        return tags if tags or _writes_reasoning(template) else [("<think>", "</think>")]

    @cached_property
    def _with_new_tokens(self) -> list[tuple[str, Template, list[str]]]:
        """The templates of the kit whose tokens the tokenizer lacks, with these tokens, if they can be added to it."""
        lacking = ((name, one, one.missing_tokens(self._tokenizer)) for name, one in SHIPPED.items())
        return [
            (name, Template(one.source, self._tokenizer), missing)
            for name, one, missing in lacking
            if missing and can_be_added(self._tokenizer, missing)
        ]

    @cached_property
    def _shipped(self) -> list[tuple[str, Template]]:
        """The templates of the kit whose tokens the tokenizer has."""
        fitting = {name: one for name, one in SHIPPED.items() if not one.missing_tokens(self._tokenizer)}
        return [(name, Template(one.source, self._tokenizer)) for name, one in fitting.items()]


def _tags_in(text: str) -> Iterator[Tags]:
    """Yield the pairs of tags in ``text`` that open and close a thought."""
    for opening in dict.fromkeys(_OPENING_TAG.findall(text)):
        closings = [opening.replace(start, end) for start, end in _CLOSINGS if start in opening]
        closing = next(iter(closings), f"{opening[0]}/{opening[1:]}")
        if closing in text:
            yield opening, closing


def _schemas(row: _Row) -> Iterator[tuple[str, _Row]]:
    """Write the parameters of tools as JSON schemas, where they are an object for each parameter."""
    tools = []
    for tool in row.tools or []:
        function = tool.get("function", tool)
        given = function.get("parameters")
        if parameters(function) and "properties" not in given:
            tool = {"type": "function", "function": function | {"parameters": {"type": "object", "properties": given}}}
        tools.append(tool)
    if tools != (row.tools or []):
        fix = 'write the parameters of tools as JSON schemas: {"type": "object", "properties": {...}}'
        yield fix, replace(row, tools=tools)


def _into_content(answer: dict[str, Any], tags: Tags) -> dict[str, Any]:
    """Return an answer whose content begins with its reasoning."""
    reasoning = (answer.get("reasoning_content") or "").strip()
    if not reasoning:
        return answer
    content = f"{tags[0]}\n{reasoning}\n{tags[1]}\n\n{answer['content']}"
    return answer | {"reasoning_content": None, "content": content}


def _into_reasoning(answer: dict[str, Any], tags: Tags) -> dict[str, Any]:
    """Return an answer whose reasoning is the thought that its content began with."""
    thought, closing, content = answer["content"].strip().partition(tags[1])
    if not closing or not thought.startswith(tags[0]) or answer.get("reasoning_content"):
        return answer
    return answer | {"reasoning_content": thought.removeprefix(tags[0]).strip(), "content": content.strip()}


def _lacks_thought(message: dict[str, Any], tags: Tags) -> bool:
    return message["role"] == "assistant" and not message.get("reasoning_content") and tags[1] not in message["content"]


def _with_empty_thought(answer: dict[str, Any], tags: Tags) -> dict[str, Any]:
    return answer | {"content": f"{tags[0]}{tags[1]}{answer['content']}"} if _lacks_thought(answer, tags) else answer


def _writes_reasoning(template: Template) -> bool:
    """Whether the template writes the reasoning of an answer, or of a call."""
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "!"} | dict.fromkeys(REASONING, _PROBE)
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"x": 1}}}
    for message in (answer, {**answer, "content": "", "tool_calls": [call]}):
        with suppress(UserError):
            if _PROBE in template.render([question, message], None):
                return True
    return False


def _is_sound(draft: Draft, messages: Messages) -> bool:
    """Whether something is learned, and each thought in it is closed, not behind an empty one, and before the calls."""
    if OPEN_THOUGHT in draft.remarks or not (draft.spans or draft.rest):
        return False
    for opening, closing in _tags_in(draft.text):
        if re.search(re.escape(opening) + r"\s*" + re.escape(closing) + r"\s*" + re.escape(opening), draft.text):
            return False
        for message in messages:
            thought, closed, _ = message["content"].partition(closing)
            for call in (message.get("tool_calls") or []) if closed else []:
                at = draft.text.find(thought.strip())
                if at >= 0 and call["function"]["name"] not in draft.text[at:]:
                    return False
    return True
