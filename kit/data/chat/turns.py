"""Conversations as text, and which characters of the text are supervised. Token ids come later (``tokens.py``).

Promises:

- An assistant turn is supervised from the end of the generation prompt to the end of its end-of-turn token.
- The text before a supervised turn is the prompt at inference, character by character (``answers.py``). But if the
  author of a template has marked the supervised text with ``{% generation %}``, the marks are followed.
- Some templates render an answer differently once more messages follow. Then the conversation becomes several texts,
  and each answer is supervised once, in the text that the model would see and write at that point.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from kit.data.chat.answer_spans import AnswerFinder, RenderedAnswer
from kit.data.chat.conversation import Conversation
from kit.data.chat.media_parts import num_media
from kit.data.chat.messages import REASONING
from kit.data.chat.shown import (
    check_extras,
    check_inline_reasoning,
    check_shown,
    inline_reasoning,
    keeps_reasoning,
    reads,
)
from kit.data.chat.template import Jinja, Messages, Template, Tools, no_template
from kit.data.chat.turn_ends import Stops
from kit.system.errors import UserError

NO_END_OF_TURN = "the chat template ends an answer without an end-of-turn token, so the model will not learn to stop"
FORGOTTEN = "the chat template drops the reasoning of masked answers, as at inference"

MAX_CHARACTERS = 1 << 24  # of all texts that one conversation becomes; a line of data has no more
MAX_DRAFTERS = 256  # kept at a time: rows may have chat_template_kwargs of their own

TrainOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A rendered conversation, and the weight of each character in the loss."""

    text: str
    spans: list[tuple[int, int, float]]  # characters [start, end) of the text, in its order, and their weight
    rest: float = 0.0  # weight of all other characters
    remarks: tuple[str, ...] = ()  # for the user
    num_media: int = 0  # of the messages in the text


class Drafter:
    """Makes drafts of conversations with one template.

    ``train_on``: "assistant" supervises all answers, "last" only the last one, "all" everything.
    """

    def __init__(self, template: Template, stops: Stops, train_on: TrainOn) -> None:
        self._template = template
        self._stops = stops
        self._train_on = train_on
        self._finder = AnswerFinder(template, stops)
        self._names = [name for name in REASONING if reads(template, name)]

    @property
    def reads_reasoning(self) -> bool:
        """Whether the template writes the reasoning of an answer."""
        return bool(self._names)

    def drafts(self, messages: Messages, first: int, tools: Tools) -> list[Draft]:
        """Return the texts in which the answers from message number ``first`` on are supervised, each answer once.

        Without messages from ``first`` on they are a prompt alone, whose text ends with the generation prompt.
        Some templates expect the arguments of tool calls as strings: if it fails with objects, strings are tried.

        Raises ``UserError`` if the template does not fit the conversation.
        """
        answers = {i: message for i, message in enumerate(messages) if message["role"] == "assistant"}
        weights = {i: 1.0 if answer.get("weight") is None else answer["weight"] for i, answer in answers.items()}
        supervised = [i for i in weights if i >= first or self._train_on == "all"]
        if self._train_on == "last":
            supervised = supervised[-1:]
        supervised = [i for i in supervised if weights[i]]
        messages = [self.prepared(message) for message in messages]
        check_extras(self._template, messages, tools, supervised)

        def made(messages: Messages) -> list[Draft]:
            if first == len(messages):
                return [self._unsupervised(messages, tools, is_prompt=True)]
            return self._drafts(messages, supervised, weights, tools)

        try:
            return made(messages)
        except UserError:
            if any(message.get("tool_calls") for message in messages):
                with suppress(UserError):
                    return made([with_json_arguments(message) for message in messages])
            raise

    def _unsupervised(self, messages: Messages, tools: Tools, is_prompt: bool) -> Draft:
        """The draft of a prompt alone, which an answer follows, or of a whole conversation."""
        text = self._template.render(messages, tools, add_generation_prompt=is_prompt)
        check_shown(self._template, text, messages, tools)
        return Draft(text, [], num_media=_num_media(messages))

    def _drafts(
        self, messages: Messages, supervised: list[int], weights: dict[int, float], tools: Tools
    ) -> list[Draft]:
        """The drafts of ``messages``, in which the answers with the numbers ``supervised`` are in the loss."""
        conversation = Conversation(self._template, messages, tools)
        for i in supervised:
            self._check_inline_reasoning(conversation, i)
        if self._train_on == "all":
            return [self._whole(messages, weights, tools)]
        answers = {i: self._finder.find(conversation, i, self._template.marks_answers) for i in supervised}
        if not answers:
            # A conversation without a supervised token is still a draft: the caller counts it as dropped.
            return [self._unsupervised(messages, tools, is_prompt=False)]
        drafts: list[Draft] = []
        while answers:
            last = next(reversed(answers))
            last_answer = self._finder.closed(answers[last], conversation, last)
            text = last_answer.text
            check_shown(self._template, text, messages[: last + 1], tools)
            covered = [i for i, answer in answers.items() if i == last or text.startswith(answer.text[: answer.end])]
            spans: list[tuple[int, int, float]] = []
            have_ends = True
            remarks = dict.fromkeys(last_answer.remarks)
            for i in covered:
                answer = answers.pop(i)
                remarks |= dict.fromkeys(answer.remarks)
                *earlier_spans, (start, end) = answer.spans
                end = last_answer.end if i == last else self._stops.with_next(text, end)
                have_ends &= self._stops.ends_turn(text, answer.spans[0][0], end)
                spans += [(left, right, weights[i]) for left, right in [*earlier_spans, (start, end)]]
            read = [messages[i] for i in weights if i < last and i not in supervised]
            remarks |= {} if have_ends else {NO_END_OF_TURN: None}
            remarks |= {} if all(keeps_reasoning(text, answer) for answer in read) else {FORGOTTEN: None}
            drafts.append(Draft(text, spans, 0.0, tuple(remarks), _num_media(messages[: last + 1])))
            if sum(len(draft.text) for draft in drafts) > MAX_CHARACTERS:
                raise self._template.too_long(MAX_CHARACTERS)
        return drafts[::-1]

    def _check_inline_reasoning(self, conversation: Conversation, i: int) -> None:
        """Raise ``UserError`` if the template rewrites the <think> block in the content of answer ``i``."""
        messages = conversation.messages
        if parts := inline_reasoning(messages[i]):
            tag, reasoning, rest = parts
            moved = self.prepared(messages[i] | {"reasoning_content": reasoning.strip(), "content": rest.strip()})
            text = moved_text = ""
            with suppress(UserError):
                text = conversation.render(i + 1)
                if self._names:
                    moved_text = self._template.render([*messages[:i], moved], conversation.tools)
            check_inline_reasoning(self._template, text, moved_text, messages[i]["content"], tag, reasoning, i)

    def _whole(self, messages: Messages, weights: dict[int, float], tools: Tools) -> Draft:
        """The draft for ``train_on="all"``: weight 1 everywhere."""
        for i, weight in weights.items():
            if weight != 1:
                found = f"its weight is {weight:g}, but --train_on all trains on every token"
                raise UserError(f"messages[{i}]", found, fix="leave it out, or --train_on assistant")
        text = self._template.render(messages, tools)
        check_shown(self._template, text, messages, tools, weights)
        conversation = Conversation(self._template, messages, tools)
        if not self._template.reads_prompt_flag and weights and messages[-1]["role"] == "assistant":
            answer = self._finder.find(conversation, len(messages) - 1)
            text = answer.text[: answer.end]  # without a header of the next turn, which nobody wrote
        remarks: tuple[str, ...] = ()
        if weights.get(len(messages) - 1):
            prompt = ""
            with suppress(UserError):
                prompt = self._finder.prompt(conversation, len(messages) - 1, text)
            start = len(prompt) if text.startswith(prompt) else 0
            end = next(iter(self._stops.at_end(text, start)), len(text))
            given = RenderedAnswer(text, [(start, end)])
            last = self._finder.closed(given, conversation, len(messages) - 1)
            text = text if last is given else last.text
            remarks = last.remarks if self._stops.ends_turn(text, start, last.end) else (*last.remarks, NO_END_OF_TURN)
        return Draft(text, [], 1.0, remarks, _num_media(messages))

    def prepared(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as ``apply_chat_template`` would be given it."""
        # Arrow fills absent keys with null, and a template that tests `is defined` would take null for a value.
        taken = {key: value for key, value in message.items() if value is not None and key != "weight"}
        if "reasoning_content" in taken:
            taken["thinking"] = taken["reasoning_content"]  # transformers adds this name too
            taken |= {name: taken["reasoning_content"] for name in self._names[:1]}
        return taken


class Drafters:
    """The drafters of a tokenizer's templates, each made when it is first needed."""

    def __init__(self, source: Jinja, tokenizer: Any, train_on: TrainOn, reads_media: bool = False) -> None:
        self._named = source if isinstance(source, dict) else {"default": source} if source is not None else {}
        self._train_on = train_on
        self._stops = Stops(tokenizer)
        self._tokenizer = tokenizer
        self._template = cache(lambda name: Template(self._named[name], tokenizer, reads_media))
        self._with_values = lru_cache(MAX_DRAFTERS)(self._make)

    def of(self, has_tools: bool, kwargs: Mapping[str, Any]) -> tuple[Template, Drafter]:
        """Return the template that ``apply_chat_template`` would take, given ``kwargs``, and its drafter.

        Raises ``UserError`` if there is no template, it does not compile, or it never reads one of ``kwargs``.
        """
        if not self._named:
            raise UserError(no_template(self._tokenizer))
        name = "tool_use" if has_tools and "tool_use" in self._named else "default"
        return self._with_values(name, json.dumps(kwargs))

    def _make(self, name: str, kwargs: str) -> tuple[Template, Drafter]:
        """Make them for the values of a row, given as JSON. Values that are empty may be of unknown variables."""
        template = self._template(name)
        # Columns of tables give every row all keys, with empty values where a row has none.
        given = json.loads(kwargs).items()
        values = {key: value for key, value in given if value not in ("", [], {}) or key in template.variables}
        if values:
            template = template.with_values(values)
        return template, Drafter(template, self._stops, self._train_on)


def _num_media(messages: Messages) -> int:
    return sum(num_media(message["content"]) for message in messages)


def with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as JSON strings, which some templates expect."""
    calls = []
    for call in message.get("tool_calls") or []:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": calls} if calls else message
