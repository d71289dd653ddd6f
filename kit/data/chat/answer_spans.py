"""Finds an answer in the rendering of its conversation: after the prompt at inference, to its end-of-turn token.

Promises:

- The text before an answer is the generation prompt, character by character. If the template writes it differently
  once the answer is there, the answer is put after the prompt. If the answer cannot be found after it, it is refused.
- An answer ends where generation would stop. What a template writes after that, such as the header of the next turn,
  is not part of it.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kit.data.chat.conversation import Conversation
from kit.data.chat.media_parts import texts_between
from kit.data.chat.shown import THINK, check_answer, check_shown, inline_reasoning
from kit.data.chat.template import AS_CONTENT, BLOCKS, OTHER_TEMPLATE, Messages, Span, Template
from kit.data.chat.turn_ends import Stops
from kit.system.errors import UserError

MOVED = "the chat template writes the text before an answer differently from the generation prompt, which is used"
OPEN_THINK = (
    "the generation prompt opens a <think> block that the answer never closes, so all of it is trained on as reasoning"
)
EMPTY_THINK = "an answer without reasoning closes the generation prompt's <think> block at once, and this is trained on"
OTHER_PROMPT = (
    "the chat template's {% generation %} blocks mark an answer after another text than the generation prompt"
)
CLOSED = "the chat template writes no end-of-turn token after the last answer: the next turn's first token was added"

# What opens or closes a part of a turn: <think>, </think>, <|channel>, [THINK].
TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
# A generation prompt that opens a <think> block, and what ends one: </think>, <|END_THINKING|>, [/THINK].
OPENED = re.compile(r"(?:<(?!\|?end)[^<>\s/]*think[^<>\s/]*>|\[THINK\])\s*$", re.IGNORECASE)
_CLOSED = re.compile(r"</[^<>\s]*think[^<>\s]*>|<[^<>\s]*end_think[^<>\s]*>|\[/THINK\]", re.IGNORECASE)
# A tag that closes a part: </think>, [/THINK], <|END_THINKING|>, <channel|>.
_CLOSING = re.compile(r"</|\[/|<\|?end|<\w+\|>$", re.IGNORECASE)
_QUESTION = {"role": "user", "content": "?"}


@dataclass(frozen=True, slots=True)
class RenderedAnswer:
    """A rendered conversation up to an answer, and where the answer is in it."""

    text: str
    spans: list[Span]  # the answer; the last of them ends with the end-of-turn token
    remarks: tuple[str, ...] = ()  # for the user

    @property
    def end(self) -> int:
        """Where the answer ends in ``text``."""
        return self.spans[-1][1]


class AnswerFinder:
    """Finds answers in the renderings of one template. All methods raise ``UserError`` if the template does not fit."""

    def __init__(self, template: Template, stops: Stops) -> None:
        self._template = template
        self._stops = stops

    def find(self, conversation: Conversation, i: int, is_marked: bool = False) -> RenderedAnswer:
        """Find message number ``i``, an answer, in the rendering of the conversation up to it.

        ``is_marked``: the answer is what the ``{% generation %}`` blocks of the template mark after the prompt.
        """
        text, blocks = conversation.render_marked(i + 1) if is_marked else (conversation.render(i + 1), [])
        whole, prompt = text, self.prompt(conversation, i, text)
        start = at = len(prompt)  # of the answer: in the text, and where it was in the rendering
        remarks: tuple[str, ...] = ()
        if not text.startswith(prompt):
            text, moved_from = self._put_after_prompt(prompt, text, conversation, i)
            if is_marked and moved_from is None:
                found = f"messages[{i}]: its {{% generation %}} blocks do not follow the generation prompt"
                raise self._template.refusal(found, BLOCKS)
            at = moved_from or start
            remarks = (MOVED,)
        if is_marked:
            spans = self._spans(text, [(left + start - at, right + start - at) for left, right in blocks], start, i)
        else:
            spans = [(start, self._end(text, prompt, whole, conversation, i))]
        answer = text[start : spans[-1][1]]
        check_answer(self._template, answer, conversation.messages[i], i)
        remarks += _think_remarks(prompt, answer)
        if not is_marked:
            self._check_one_turn(answer, conversation.messages[i], i)
        elif all(left != start for left, _ in spans):
            remarks += (OTHER_PROMPT,)
        return RenderedAnswer(text, spans, remarks)

    def _spans(self, text: str, blocks: list[Span], start: int, i: int) -> list[Span]:
        """The parts of the ``{% generation %}`` blocks after ``start``, to the end-of-turn token of the last."""
        # Some templates mark the header of the turn too, which at inference is part of the generation prompt.
        spans = [(max(left, start), right) for left, right in blocks if right > start]
        if not spans:
            found = f"messages[{i}]: its {{% generation %}} blocks mark nothing in this answer"
            raise self._template.refusal(found, BLOCKS)
        left, right = spans[-1]
        ends = self._stops.at_end(text[:right], left)
        return [*spans[:-1], (left, ends[0] if ends else self._stops.with_next(text, right))]

    def prompt(self, conversation: Conversation, i: int, text: str) -> str:
        """Return the prompt at inference for message number ``i``, an answer. ``text`` is the rendering up to it."""
        if i:
            return conversation.render(i, add_generation_prompt=True)
        # There is no prompt for an empty conversation: many templates fail, and `apply_chat_template` refuses it.
        with_question = [conversation.messages[0], _QUESTION]
        whole = self._template.render(with_question, conversation.tools, add_generation_prompt=True)
        header = whole.removeprefix(self._template.render(with_question, conversation.tools))
        if header.strip() and header != whole and text.count(header) == 1:
            return text[: text.index(header) + len(header)]
        return self._template.render([], conversation.tools, add_generation_prompt=True)

    def closed(self, answer: RenderedAnswer, conversation: Conversation, i: int) -> RenderedAnswer:
        """Return ``answer``, number ``i``; if no end-of-turn token ends it, with the token that would come next."""
        text, start, end = answer.text, answer.spans[0][0], answer.end
        if self._stops.ends_turn(text, start, end):
            return answer
        longer = self._followed(conversation, i)
        # Its reasoning may be gone there, so its last part is looked for.
        tail = text[_start_of_last_part(text, start, end, conversation.messages[i]) : end]
        at = longer.find(tail, max(0, _num_shared(longer, text[:end]) - len(tail)))
        while at >= 0:
            tail_end = at + len(tail)
            next_end = self._stops.with_next(longer, tail_end)
            if next_end > tail_end:
                text = text[:end] + longer[tail_end:next_end]
                spans = [*answer.spans[:-1], (answer.spans[-1][0], len(text))]
                return RenderedAnswer(text, spans, (*answer.remarks, CLOSED))
            at = longer.find(tail, at + 1)
        return answer

    def _followed(self, conversation: Conversation, i: int) -> str:
        """The rendering of the answer number ``i`` and a question, or result, after it; empty if it is refused."""
        following = _QUESTION
        calls = conversation.messages[i].get("tool_calls")
        if calls:
            following = {"role": "tool", "content": "?", "name": calls[0]["function"]["name"]}
            if "id" in calls[0]:
                following["tool_call_id"] = calls[0]["id"]
        with suppress(UserError):
            return self._template.render([*conversation.messages[: i + 1], following], conversation.tools)
        return ""

    def _end(self, text: str, prompt: str, whole: str, conversation: Conversation, i: int) -> int:
        """Where the answer after ``prompt`` in ``text`` ends. ``whole``, as it was rendered, has the same end."""
        ends = self._stops.at_end(text, len(prompt))
        content_end = _end_of_parts(text, len(prompt), conversation.messages[i])
        if len(ends) == 1 and self._template.reads_prompt_flag:
            end = ends[0]
        else:
            longer = ""
            with suppress(UserError):  # some templates refuse two answers in a row
                longer = conversation.render(i + 1, add_generation_prompt=True)
            # The last may end the whole conversation, and disappear if another message follows (Phi-3's does).
            lasting = [end for end in ends if longer.startswith(whole.removesuffix(text[end:]))]
            end = next(iter(lasting or ends), len(text))
            if longer == whole:
                end = self._before_header(text, prompt, content_end, i) or end
        if end - content_end > self._stops.longest and self._stops.within(text[content_end:end]) > 2:
            num_differing = len(whole) - _num_shared(self._followed(conversation, i), whole)
            shared_end = len(text) - num_differing  # up to here the text stays if another message follows
            more = text[shared_end:end].strip()
            if shared_end > content_end and more and conversation.render(i).rstrip().endswith(more):
                found = (
                    f"messages[{i}]: the template writes more after the answer, without an end of turn: {more[:30]!r}"
                )
                raise self._template.refusal(found)
        return end

    def _before_header(self, text: str, prompt: str, content_end: int, i: int) -> int | None:
        """Where the answer ends if the template has opened the next turn after it; None if it has not.

        ``content_end``: where the content of the answer ends in ``text``.
        """
        end = text.rfind(self._stops.eos, content_end) + len(self._stops.eos) if self._stops.eos else 0
        if end > content_end and prompt.rstrip().endswith(text[end:].strip()):
            return end
        # What text and prompt end with alike: after a header of the next turn, it is this header.
        tail = text[len(text) - _num_shared(prompt[::-1], text[content_end:][::-1]) :]
        is_one_token = self._stops.before(tail.rstrip(), len(tail.rstrip())) == tail.strip()
        begins_line = text[: len(text) - len(tail)].endswith("\n")
        if is_one_token or not (self._stops.within(tail) or begins_line):
            return None
        found = (
            f"messages[{i}]: the template opens the next turn after every answer ({tail[-30:]!r}), and writes no EOS"
        )
        fix = "set eos_token in tokenizer_config.json to the token that the template writes after an answer"
        raise self._template.refusal(found, fix)

    def _put_after_prompt(self, prompt: str, text: str, conversation: Conversation, i: int) -> tuple[str, int | None]:
        """Put the answer after ``prompt``, if ``text`` does not begin with ``prompt``, but has its header.

        Returns this text, and where the answer begins in ``text``; None if it has only the end of the answer.

        The header is what the generation prompt adds. It may hold a part that the template does not write before an
        answer, such as an empty <think> block: then the answer follows the part of the header that is there.
        """
        without_header = conversation.render(i)
        header = prompt.removeprefix(without_header) if prompt.startswith(without_header) else ""
        answer_limit = len(text)
        opened = prompt.rpartition(self._stops.eos)[2] if self._stops.eos and prompt == without_header else ""
        if opened and text.endswith(opened):  # it always opens the next turn
            header = opened
            answer_limit = len(text) - len(opened)
        cuts = [len(header), *sorted((tag.start() for tag in TAG.finditer(header)), reverse=True)]
        for cut in cuts if header.strip() else []:
            at = self._after_header(text, header[:cut], answer_limit, conversation.messages, i) if cut else None
            if at is None:
                continue
            answer = text[at:]
            missing = TAG.findall(header[cut:])
            if len(missing) % 2:  # it opens a <think> block, and the answer has none
                reasoning = _continued(header[cut:], conversation.messages[i], answer)
                if reasoning is not None:
                    return prompt + reasoning, None
            elif not missing or (_CLOSING.match(missing[-1]) and not answer.lstrip().startswith(tuple(missing))):
                return prompt + answer, at
            break
        reason = f"messages[{i}]: the text before the answer differs from the generation prompt"
        fix = OTHER_TEMPLATE
        if not i:
            fix = 'give the first answer "train": false, or put a question before it'
        elif OPENED.search(prompt) and not inline_reasoning(conversation.messages[i]):
            fix = AS_CONTENT
        at = _num_shared(text, prompt)
        raise self._template.refusal(f"{reason} ({text[at : at + 20]!r} instead of {prompt[at : at + 20]!r})", fix)

    def _check_one_turn(self, answer: str, message: dict[str, Any], i: int) -> None:
        """Raise ``UserError`` if a template makes several turns of an answer: generation stops at the first EOS.

        The reasoning may be a turn: after that, servers of such models continue.
        """
        eos = self._stops.eos
        if not eos or answer.count(eos) < 2:
            return
        reasoning = (message.get("reasoning_content") or "").strip()
        visible = answer.partition(reasoning)[2].lstrip().removeprefix(eos) if reasoning else answer
        said = json.dumps([message["content"], message.get("tool_calls")], ensure_ascii=False)
        if visible.count(eos) > 1 + said.count(eos):
            reason = f"messages[{i}]: the template writes {eos} inside the answer, where generation stops"
            raise self._template.refusal(reason)

    def _after_header(self, text: str, header: str, limit: int, messages: Messages, i: int) -> int | None:
        """Where answer number ``i`` begins in ``text``: after the last ``header`` that the whole answer follows.

        An answer may be several messages, each with a header. If it is nowhere whole, this is after the last header;
        and None if there is no header after the messages before the answer.
        """
        # Earlier answers may be rendered differently than in the prompt, or be left out: the prompt has them.
        others = [message for message in messages[:i] if message["role"] != "assistant"]
        starts: list[int] = []
        while (at := text.rfind(header, 0, limit)) >= 0:
            start, limit = at + len(header), at
            try:
                check_shown(self._template, text[:start], others, None)
            except UserError:
                break
            starts.append(start)
            with suppress(UserError):
                check_answer(self._template, text[start:], messages[i], i)
                return start
        return next(iter(starts), None)


def _think_remarks(prompt: str, answer: str) -> tuple[str, ...]:
    """Remarks on an answer whose generation prompt opens a <think> block."""
    # Such a tag has no other bracket in it; a search from the start would try each of the prompt.
    starts = (prompt.rfind("<"), prompt.rfind("["))
    if not any(OPENED.match(prompt, start) for start in starts if start >= 0):
        return ()
    closing = _CLOSED.search(answer)
    reasoning = answer[: closing.start()] if closing else answer
    remarks = []
    if not closing:
        remarks.append(OPEN_THINK)
    if not reasoning.strip():
        remarks.append(EMPTY_THINK)
    return tuple(remarks)


def _continued(opening: str, message: dict[str, Any], answer: str) -> str | None:
    """What the model writes after a prompt that opens a <think> block, if the content has it and ``answer`` not.

    Args:
        opening: the end of the prompt, such as ``"<think>\\n"``.
        answer: what the template writes: the content without its reasoning, and the end of the turn.
    """
    content = message["content"].strip()
    tag = opening.strip()
    closing = f"{tag[:1]}/{tag[1:]}"
    if not content.startswith(tag) or closing not in content or message.get("reasoning_content"):
        return None
    visible = content.rpartition(closing)[2].strip()
    if not visible or not answer.lstrip().startswith(visible):
        return None
    rest = content.removeprefix(tag).removeprefix(opening[opening.index(tag) + len(tag) :])
    return rest + answer.lstrip()[len(visible) :]


def _start_of_last_part(text: str, start: int, end: int, message: dict[str, Any]) -> int:
    """Where ``text[start:end]``, an answer, has the name of its last call, or else its content after the reasoning."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or []]
    part = names[-1] if names else THINK.split(texts_between(message["content"])[-1])[-1].strip()
    return max(text.rfind(part, start, end), start) if part else start


def _end_of_parts(text: str, start: int, message: dict[str, Any]) -> int:
    """Where the content of ``message`` and what its calls name end in ``text[start:]``."""
    parts = [texts_between(message["content"])[-1].strip()]
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        parts.append(call["function"]["name"])
        if isinstance(arguments, str):
            parts.append(arguments)
        else:
            parts += arguments  # their names
    end = start
    for part in parts:
        at = text.rfind(part, start)
        if part and at >= 0:
            end = max(end, at + len(part))
    return end


def _num_shared(a: str, b: str) -> int:
    """How many characters are the same at the start of both."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
