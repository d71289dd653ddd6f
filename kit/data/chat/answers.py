"""Finds an answer in the rendering of its conversation: after the prompt at inference, to its end-of-turn token.

Promises:

- The text before an answer is the prompt at inference, character by character. If the template writes it otherwise
  once the answer is there, the answer is put after the prompt. If it cannot be told apart from it, it is refused.
- An answer ends where generation would stop. What a template writes behind that, such as the header of the next turn,
  is not part of it.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kit.data.chat.shown import check_answer, check_shown
from kit.data.chat.stops import Stops
from kit.data.chat.template import Messages, Span, Template, Tools
from kit.errors import UserError

MOVED = "the chat template writes the text before an answer otherwise than the prompt at inference, which is taken"
OPEN_THOUGHT = "the prompt opens a thought that the answer does not close, so it is learned as a thought"
EMPTY_THOUGHT = "an answer without reasoning closes at once the thought that the prompt opens, and this is learned"
OTHER_PROMPT = "the chat template marks an answer after a text that differs from the prompt at inference"
CLOSED = "the chat template leaves a last answer open: it was closed with the token that another turn would begin with"

# What opens or closes a part of a turn: <think>, </think>, <|channel>, [THINK].
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
# A prompt that opens a thought, and what ends one: </think>, <|END_THINKING|>, [/THINK].
_OPENED = re.compile(r"(?:<(?!\|?end)[^<>\s/]*think[^<>\s/]*>|\[THINK\])\s*$", re.IGNORECASE)
_CLOSED = re.compile(r"</[^<>\s]*think[^<>\s]*>|<[^<>\s]*end_think[^<>\s]*>|\[/THINK\]", re.IGNORECASE)
VALUES = (False, True, "none")  # of variables for thinking
_QUESTION = {"role": "user", "content": "?"}
_OPENING = 'give the answer "train": false, and it is only read'


@dataclass(frozen=True, slots=True)
class Answer:
    """A conversation up to an answer."""

    text: str
    spans: list[Span]  # the answer; the last of them ends with the end-of-turn token
    remarks: tuple[str, ...] = ()  # for the user

    @property
    def end(self) -> int:
        """Where the answer ends in ``text``."""
        return self.spans[-1][1]


class Finder:
    """Finds answers in the renderings of one template. All methods raise ``UserError`` if the template does not fit."""

    def __init__(self, template: Template, stops: Stops) -> None:
        self._template, self._stops = template, stops
        self._cures = list(product(sorted(filter(re.compile("think|reason").search, template.variables)), VALUES))
        self._searches = 10  # refused answers for which all of these are tried; later ones, only what helped before

    def find(self, messages: Messages, i: int, tools: Tools) -> Answer:
        """Find message number ``i``, an answer."""
        try:
            return self._find(messages, i, tools)
        except UserError as error:
            problem = error.problems[0]
            fix = self._cure_of(messages, i, tools) or problem.fix
            if not fix and not any(message["role"] == "user" for message in messages[:i]):
                with suppress(UserError):  # only if it is this answer that the template refuses
                    self._template.render(messages, tools)
                    fix = _OPENING
            raise UserError(replace(problem, fix=fix)) from None

    def _find(self, messages: Messages, i: int, tools: Tools) -> Answer:
        text = whole = self._template.render(messages[: i + 1], tools)
        prompt = self.prompt(messages, i, tools, text)
        remarks: tuple[str, ...] = ()
        if not text.startswith(prompt):
            text, _ = self._after(prompt, text, messages, i, tools)
            remarks = (MOVED,)
        end = self._end(text, prompt, whole, messages, i, tools)
        answer = text[len(prompt) : end]
        check_answer(self._template, answer, messages[i], i)
        return Answer(text, [(len(prompt), end)], remarks + _thought_remarks(prompt, answer))

    def find_marked(self, messages: Messages, i: int, tools: Tools) -> Answer | None:
        """Find message number ``i``, an answer, by the ``{% generation %}`` blocks of the template.

        Returns None if the text after the prompt at inference cannot be found, and so not whose the blocks are.
        """
        text, blocks = self._template.render_marked(messages[: i + 1], tools)
        prompt = self.prompt(messages, i, tools, text)
        remarks: tuple[str, ...] = ()
        if not text.startswith(prompt):
            try:
                text, at = self._after(prompt, text, messages, i, tools)
            except UserError:
                return None
            if at is None:
                return None
            blocks = [(start - at + len(prompt), end - at + len(prompt)) for start, end in blocks]
            remarks = (MOVED,)
        # Some templates mark the header of the turn too, which at inference is part of the generation prompt.
        spans = [(max(start, len(prompt)), end) for start, end in blocks if end > len(prompt)]
        if not spans:
            raise self._template.refusal(f"messages[{i}]: its {{% generation %}} blocks mark nothing in this answer")
        start, end = spans[-1]
        inside = self._stops.at_end(text[:end], start)
        spans[-1] = start, inside[0] if inside else self._stops.with_next(text, end)
        answer = text[len(prompt) : spans[-1][1]]
        check_answer(self._template, answer, messages[i], i)
        remarks += _thought_remarks(prompt, answer)
        if all(start != len(prompt) for start, _ in spans):
            remarks = (*remarks, OTHER_PROMPT)
        return Answer(text, spans, remarks)

    def prompt(self, messages: Messages, i: int, tools: Tools, text: str) -> str:
        """The prompt at inference for message number ``i``, an answer. ``text`` is the rendering up to it."""
        if i:
            return self._template.render(messages[:i], tools, add_generation_prompt=True)
        # There is no prompt for an empty conversation: many templates fail, and `apply_chat_template` refuses it.
        asked = [messages[0], _QUESTION]
        whole = self._template.render(asked, tools, add_generation_prompt=True)
        header = whole.removeprefix(self._template.render(asked, tools))
        if header.strip() and header != whole and text.count(header) == 1:
            return text[: text.index(header) + len(header)]
        return self._template.render([], tools, add_generation_prompt=True)

    def closed(self, answer: Answer, messages: Messages, i: int, tools: Tools) -> Answer:
        """The answer number ``i`` with the token that would come next, if the template writes no end-of-turn token."""
        if self._stops.before(answer.text, answer.end):
            return answer
        longer = self._followed(messages, i, tools)
        end = self._stops.with_next(longer, answer.end)
        if end > answer.end and longer.startswith(answer.text[: answer.end]):
            spans = [*answer.spans[:-1], (answer.spans[-1][0], end)]
            return Answer(longer[:end], spans, (*answer.remarks, CLOSED))
        return answer

    def _followed(self, messages: Messages, i: int, tools: Tools) -> str:
        """The rendering up to the message after the answer number ``i``, which asks; empty if it is refused."""
        following, calls = _QUESTION, messages[i].get("tool_calls")
        if calls:
            call = {"tool_call_id": calls[0]["id"]} if "id" in calls[0] else {}
            following = {"role": "tool", "content": "?", "name": calls[0]["function"]["name"], **call}
        with suppress(UserError):
            return self._template.render([*messages[: i + 1], following], tools)
        return ""

    def _end(self, text: str, prompt: str, whole: str, messages: Messages, i: int, tools: Tools) -> int:
        """Where the answer after ``prompt`` in ``text`` ends. ``whole``, as it was rendered, has the same end."""
        ends = self._stops.at_end(text, len(prompt))
        said = _end_of_parts(text, len(prompt), messages[i])
        if len(ends) == 1 and self._template.reads_prompt_flag:
            end = ends[0]
        else:
            longer = ""
            with suppress(UserError):  # some templates refuse two answers in a row
                longer = self._template.render(messages[: i + 1], tools, add_generation_prompt=True)
            opened = self._before_header(text, prompt, said, i) if longer == whole else None
            # The last may end the whole conversation, and disappear if another message follows (Phi-3's does).
            ends = [end for end in ends if longer.startswith(whole[: end - len(text) or None])] or ends
            end = opened or (ends[0] if ends else len(text))
        if end - said > self._stops.longest and self._stops.within(text[said:end]) > 2:
            shared = _shared(self._followed(messages, i, tools), whole) - len(whole) + len(text)
            more = text[shared:end].strip()
            if shared > said and more and self._template.render(messages[:i], tools).rstrip().endswith(more):
                found = f"messages[{i}]: the template writes more behind the answer, without an end: {more[:30]!r}"
                raise self._template.refusal(found)
        return end

    def _before_header(self, text: str, prompt: str, said: int, i: int) -> int | None:
        """Where the answer ends if the template has opened the next turn after it; None if it has not.

        ``said``: where the content of the answer ends in ``text``.
        """
        end = text.rfind(self._stops.eos, said) + len(self._stops.eos) if self._stops.eos else 0
        if end > said and prompt.rstrip().endswith(text[end:].strip()):
            return end
        tail = text[len(text) - _shared(prompt[::-1], text[said:][::-1]) :]
        alone = self._stops.before(tail.rstrip(), len(tail.rstrip())) == tail.strip()
        if alone or not (self._stops.within(tail) or text[: len(text) - len(tail)].endswith("\n")):
            return None
        found = (
            f"messages[{i}]: the template opens the next turn after every answer ({tail[-30:]!r}), and writes no EOS"
        )
        fix = "name the token that ends a turn as eos_token in tokenizer_config.json"
        raise self._template.refusal(found, fix=fix)

    def _after(self, prompt: str, text: str, messages: Messages, i: int, tools: Tools) -> tuple[str, int | None]:
        """``prompt`` and after it the answer, if ``text`` does not begin with ``prompt``, but has its header.

        Also where the answer begins in ``text``; None if it has only the end of the answer.

        The header is what the generation prompt adds. It may hold a part that the template does not write before an
        answer, such as an empty thought: then the answer follows what it writes of the header.
        """
        bare = self._template.render(messages[:i], tools)
        header, upto = prompt.removeprefix(bare) if prompt.startswith(bare) else "", len(text)
        opened = prompt.rpartition(self._stops.eos)[2] if self._stops.eos and prompt == bare else ""
        if opened and text.endswith(opened):  # it always opens the next turn
            header, upto = opened, len(text) - len(opened)
        cuts = [len(header), *sorted((tag.start() for tag in _TAG.finditer(header)), reverse=True)]
        for cut in cuts if header.strip() else []:
            at = text.rfind(header[:cut], 0, upto) + cut
            if not cut or at < cut or not self._is_shown(text[:at], messages[:i]):
                continue
            answer, missing = text[at:], _TAG.findall(header[cut:])
            if len(missing) % 2:  # it opens a thought, and the answer is none
                thought = _continued(header[cut:], messages[i], answer)
                if thought is not None:
                    return prompt + thought, None
            elif not answer.lstrip().startswith(tuple(missing) or "\0"):
                return prompt + answer, at
            break
        reason = f"messages[{i}]: the text before the answer differs from the prompt at inference"
        tag = _OPENED.search(header)
        fix = (
            f"the prompt opens a thought: begin each content with {tag[0].strip()}, and end the thought" if tag else ""
        )
        raise self._template.refusal(reason + first_difference(text, prompt), fix=fix)

    def _is_shown(self, text: str, messages: Messages) -> bool:
        with suppress(UserError):
            check_shown(self._template, text, messages, None)
            return True
        return False

    def _cure_of(self, messages: Messages, i: int, tools: Tools) -> str:
        """The ``chat_template_kwargs`` with which a refused answer would be found; an empty string if none help."""
        for name, value in self._cures:
            with suppress(UserError):
                Finder(self._template.with_values({name: value}), self._stops)._find(messages, i, tools)
                self._cures, self._searches = [(name, value)], 0
                shown = value if isinstance(value, str) else str(value).lower()
                return f"--chat_template_kwargs {name}={shown} makes a prompt that fits"
        self._searches -= 1
        if not self._searches:
            self._cures = []
        return ""


def _thought_remarks(prompt: str, answer: str) -> tuple[str, ...]:
    if not _OPENED.search(prompt):
        return ()
    thought, closing, _ = answer.partition((_CLOSED.search(answer) or "\0")[0])
    return (OPEN_THOUGHT,) * (not closing) + (EMPTY_THOUGHT,) * (not thought.strip())


def _continued(opening: str, message: dict[str, Any], answer: str) -> str | None:
    """What the model writes after a prompt that opens a thought, if the content has the thought and ``answer`` not.

    Args:
        opening: the end of the prompt, such as ``"<think>\\n"``.
        answer: what the template writes: the content without its thought, and the end of the turn.
    """
    content, tag = message["content"].strip(), opening.strip()
    closing = f"{tag[:1]}/{tag[1:]}"
    if not content.startswith(tag) or closing not in content or message.get("reasoning_content"):
        return None
    visible = content.rpartition(closing)[2].strip()
    if not visible or not answer.lstrip().startswith(visible):
        return None
    rest = content.removeprefix(tag).removeprefix(opening[opening.index(tag) + len(tag) :])
    return rest + answer.lstrip()[len(visible) :]


def _end_of_parts(text: str, start: int, message: dict[str, Any]) -> int:
    """Where the content of ``message`` and what its calls name end in ``text[start:]``."""
    parts = [message["content"].strip()]
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        parts += [call["function"]["name"], *([arguments] if isinstance(arguments, str) else arguments)]
    return max([start, *(at + len(part) for part in parts if part and (at := text.rfind(part, start)) >= 0)])


def _shared(a: str, b: str) -> int:
    """How many characters are the same at the start of both."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def first_difference(text: str, part: str) -> str:
    """For a message: what ``text`` has where it first differs from ``part``, and what ``part`` has there."""
    at = _shared(text, part)
    return f" ({text[at : at + 20]!r} instead of {part[at : at + 20]!r})"
