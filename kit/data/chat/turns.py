"""Conversations as text, and which characters of the text are supervised. Token ids come later (``tokens.py``).

Promises:

- An assistant turn is supervised from the end of the generation prompt to the end of its end-of-turn token.
- The text before a supervised turn equals the prompt at inference, character by character; if not, the template is
  refused. But if its author has marked the text to learn from with ``{% generation %}``, the marks are followed.
- Some templates render an answer differently once more messages follow. Then the conversation becomes several texts,
  and each answer is supervised once, in the text that the model would see and write at that point.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Literal

from kit.data.chat.template import Messages, Template, Tools
from kit.errors import UserError

NO_END_OF_TURN = "the chat template ends an answer without a special token, so nothing teaches the model to stop"
OTHER_PROMPT = "the chat template marks an answer after a text that differs from the prompt at inference"

TrainOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A rendered conversation, and the weight of each character in the loss."""

    text: str
    spans: list[tuple[int, int, float]]  # characters [start, end) of the text, and their weight
    rest: float = 0.0  # weight of all other characters
    remarks: tuple[str, ...] = ()  # for the user


@dataclass(frozen=True, slots=True)
class _Turn:
    """The rendering of a conversation up to an answer, which is its last message."""

    text: str
    start: int  # the answer is text[start:end], with its end-of-turn token
    end: int


class Drafter:
    """Makes drafts of conversations with one template.

    ``train_on``: "assistant" supervises all answers, "last" only the last one, "all" everything.
    """

    def __init__(self, template: Template, tokenizer: Any, train_on: TrainOn) -> None:
        self._template, self._train_on = template, train_on
        # Tokens that may end an answer, such as <|im_end|>. Tokens inside an answer, such as </think>, are not special.
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._stops = {token.content for token in added}
        self._special_stops = {token.content for token in added if token.special}
        self._stop_lengths = sorted({len(stop) for stop in self._stops}, reverse=True)

    def drafts(self, messages: Messages, first: int, tools: Tools) -> list[Draft]:
        """The texts in which the answers from message number ``first`` on are supervised, each answer once.

        Raises ``UserError`` if the template does not fit the conversation.
        """
        weights = {i: _weight(message) for i, message in enumerate(messages) if message["role"] == "assistant"}
        messages = [_as_templates_take_it(message) for message in messages]
        self._template.check_extras(messages, tools)
        if self._train_on == "all":
            return [self._whole(messages, weights, tools)]
        taught = [i for i in weights if i >= first]
        if self._train_on == "last":
            taught = taught[-1:]
        if self._template.marks_answers and taught:
            return [self._marked(messages, weights, taught, tools)]
        turns = {i: self._turn(messages, i, tools) for i in taught if weights[i]}
        drafts: list[Draft] = []
        while turns:
            last = next(reversed(turns))
            text = turns[last].text
            self._template.check_shown(text, messages[: last + 1], tools)
            covered = [i for i, turn in turns.items() if text.startswith(turn.text[: turn.end])]
            spans = []
            for i in covered:
                turn = turns.pop(i)
                spans.append((turn.start, self._with_stop(text, turn.end), weights[i]))
            drafts.append(Draft(text, spans, remarks=self._remarks(text, [end for _, end, _ in spans])))
        # A conversation with nothing to learn from is still a draft: the caller counts it as dropped.
        return drafts[::-1] or [Draft(self._template.render(messages, tools), [])]

    def _turn(self, messages: Messages, i: int, tools: Tools) -> _Turn:
        """Render the conversation up to message number ``i``, an answer. Raises ``UserError``, see the promises."""
        prompt = self._template.render(messages[:i], tools, add_generation_prompt=True)
        text = self._template.render(messages[: i + 1], tools)
        if not text.startswith(prompt):
            reason = f"messages[{i}]: the text before the answer differs from the prompt at inference"
            raise self._template.refusal(reason + _first_difference(text, prompt))
        ends = self._stops_at_end(text, len(prompt))
        if len(ends) > 1:
            # The last of them may end the whole conversation, and disappear if another message follows (Phi-3's does).
            try:
                longer = self._template.render(messages[: i + 1], tools, add_generation_prompt=True)
            except UserError:  # some templates refuse two answers in a row
                longer = text
            ends = [end for end in ends if longer.startswith(text[:end])] or ends
        end = ends[0] if ends else len(text)
        self._template.check_answer(text[len(prompt) : end], messages[i], i)
        return _Turn(text, len(prompt), end)

    def _whole(self, messages: Messages, weights: dict[int, float], tools: Tools) -> Draft:
        """The draft for ``train_on="all"``: weight 1 everywhere, except in answers with another weight."""
        text = self._template.render(messages, tools)
        self._template.check_shown(text, messages, tools)
        spans = []
        for i in (i for i, weight in weights.items() if weight != 1):
            turn = self._turn(messages, i, tools)
            if not text.startswith(turn.text[: turn.end]):
                reason = f"messages[{i}]: it has a weight, but is rendered differently once more messages follow"
                raise self._template.refusal(reason + _first_difference(text, turn.text))
            spans.append((turn.start, turn.end, weights[i]))
        return Draft(text, spans, rest=1.0)

    def _marked(self, messages: Messages, weights: dict[int, float], taught: list[int], tools: Tools) -> Draft:
        """The draft for a template with ``{% generation %}`` blocks: those of the answers ``taught`` are supervised.

        A block belongs to the last answer whose prompt ends before the block does. If some prompt is not a prefix of
        the text, the blocks belong to the answers in their order, one each. Raises ``UserError`` if neither is so and
        the answers count differently, or if no block marks anything.
        """
        answers = list(weights)
        messages = messages[: answers[-1] + 1]  # nothing after the last answer is ever learned from
        text, blocks = self._template.render_marked(messages, tools)
        self._template.check_shown(text, messages, tools)
        prompts = [self._template.render(messages[:i], tools, add_generation_prompt=True) for i in answers]
        starts = [len(prompt) for prompt in prompts if text.startswith(prompt)]
        are_known = True
        if len(starts) == len(answers):
            owners = [bisect_right(starts, end - 1) - 1 for _, end in blocks]  # -1: before the first answer
        elif len(blocks) == len(answers):
            owners = list(range(len(blocks)))
        elif taught == answers and set(weights.values()) == {1.0}:
            owners = [0] * len(blocks)  # all answers count the same, so it does not matter whose they are
            are_known = False
        else:
            found = f"{len(blocks)} {{% generation %}} blocks for {len(answers)} answers: which is whose cannot be told"
            raise self._template.refusal(found)
        # The end-of-turn token, if the author left it outside the block.
        outside = text[blocks[-1][1] : self._with_stop(text, blocks[-1][1])] if blocks else ""
        spans, ends = [], {}
        for (start, end), owner in zip(blocks, owners, strict=True):
            if owner < 0 or answers[owner] not in taught:
                continue
            # Some templates mark the header of the turn too, which at inference is part of the generation prompt.
            start = max([start, *(s for s in starts if start < s < end)])
            inside = self._stops_at_end(text[:end], start)
            ends[owner] = end = inside[0] if inside else end + len(outside) * text.startswith(outside, end)
            spans.append((start, end, weights[answers[owner]]))
        if not spans:
            raise self._template.refusal("its {% generation %} blocks mark nothing in this conversation")
        for owner, end in ends.items():
            begin = starts[owner] if len(starts) == len(answers) else 0
            self._template.check_answer(text[begin:end], messages[answers[owner]], answers[owner])
        befores = {text[:start] for start, _, _ in spans}
        fits = are_known and all(prompts[owner] in befores for owner in ends)
        remarks = self._remarks(text, list(ends.values())) + (OTHER_PROMPT,) * (not fits)
        return Draft(text, [span for span in spans if span[2] and span[0] < span[1]], remarks=remarks)

    def _remarks(self, text: str, ends: list[int]) -> tuple[str, ...]:
        return (NO_END_OF_TURN,) * (not all(self._stop_before(text, end) for end in ends))

    def _stop_before(self, text: str, end: int, start: int = 0) -> str:
        """The token at the end of ``text[start:end]``, if it may end an answer; else an empty string."""
        words = (text[end - length : end] for length in self._stop_lengths if end - length >= start)
        return next((word for word in words if word in self._stops), "")

    def _stops_at_end(self, text: str, start: int) -> list[int]:
        """The end positions of all tokens at the end of ``text[start:]``, last first. Whitespace is skipped."""
        ends: list[int] = []
        end = len(text.rstrip())
        while stop := self._stop_before(text, end, start):
            ends.append(end)
            end = start + len(text[start : end - len(stop)].rstrip())
        return ends

    def _with_stop(self, text: str, end: int) -> int:
        """The end of an answer: ``end``, or the end of the token after it if ``text[:end]`` has no end-of-turn token.

        In some templates the token that opens the next turn is what ends an answer.
        """
        before = self._stop_before(text, end)
        at = end
        while text[at : at + 1].isspace():
            at += 1
        stops = set() if before in self._special_stops else self._special_stops if before else self._stops
        words = (text[at : at + length] for length in self._stop_lengths)
        return next((at + len(word) for word in words if word in stops), end)


def _weight(message: dict[str, Any]) -> float:
    weight = message.get("weight")
    return 1.0 if weight is None else float(weight)


def _as_templates_take_it(message: dict[str, Any]) -> dict[str, Any]:
    """A message as ``apply_chat_template`` would be given it."""
    # Arrow fills absent keys with null, and a template that tests `is defined` would take null for a value.
    taken = {key: value for key, value in message.items() if value is not None and key != "weight"}
    if "reasoning_content" in taken:
        taken["thinking"] = taken["reasoning_content"]  # some templates use this name
    return taken


def _first_difference(text: str, part: str) -> str:
    """For a message: what ``text`` has where it first differs from ``part``, and what ``part`` has there."""
    at = next((k for k, (a, b) in enumerate(zip(text, part, strict=False)) if a != b), min(len(text), len(part)))
    return f" ({text[at : at + 20]!r} instead of {part[at : at + 20]!r})"
