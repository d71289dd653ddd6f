"""The token ids with which tool results, and the prompt of the next turn, follow a turn that the model has sampled.

Promises:

- Sampled ids are never encoded again: the ids of results are appended to them, after the end-of-turn token.
- ``check`` proves, without a model, that the prompt of the next turn, encoded at once, is the encoding of the text to
  the end of the turn, and the appended ids. Of a template that rewrites turns of the model once results follow, it
  proves the same of all text between them: they stay as they were sampled, and ``rewrites`` says what the template
  would make of them.
- A template that rewrites anything else is refused.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import product, zip_longest
from typing import Any

from kit.data.chat.answer_spans import OPENED, TAG, AnswerFinder
from kit.data.chat.conversation import Conversation
from kit.data.chat.shown import check_shown
from kit.data.chat.template import Jinja, Messages
from kit.data.chat.turn_ends import Stops
from kit.data.chat.turns import Drafters, with_json_arguments
from kit.rollouts.tools.tool_calls import ToolCall, result_of, turn_of
from kit.system.errors import UserError

KEEPS_TURNS = (
    "--chat_template_kwargs enable_thinking=true if it reads that, or --chat_template with a template that writes an "
    "earlier turn as the model wrote it"
)
NO_END = "it ends a turn with a call without an end-of-turn token"

# Results that templates and tokenizers may trip over.
_CONTENTS = ("42", "", '{"degrees": -0.5, "sky": "clear"}', "\n two\n\nlines \n", "é ∑ 漢字 🙂", 'say "x" \\n')
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"city": "Oslo"},
    {"text": "é 漢字\n", "numbers": [1, -2.5], "is_on": True},
)
_QUESTION = {"role": "user", "content": "?"}
_OPENING = [{"role": "system", "content": "Be kind."}, _QUESTION, {"role": "assistant", "content": "Yes."}]
_REASONING = {"reasoning_content": "Think."}
_PROBE = "probe_tool"


@lru_cache(1)  # the proof takes up to 0.4 s, and each evaluation asks for the same one
def _proven(asked: str, tokenizer: Any) -> "ToolTurns":
    source, tools = json.loads(asked)
    turns = ToolTurns(source, tokenizer, tools)
    turns.check()
    return turns


def proven_turns(source: Jinja, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> "ToolTurns":
    """Return ``ToolTurns`` of these arguments after ``check``. Raises ``UserError`` as both do."""
    return _proven(json.dumps([source, [*tools]]), tokenizer)


class ToolTurns:
    """How a chat template writes tool results. All methods raise ``UserError`` if it does not take the conversation.

    Attributes:
        end: the id that ends a turn with calls, at which sampling has to stop.
        rewrites: after ``check`` when and what it would change in turns of the model, which stay as they were sampled;
            empty if nothing.
        takes_several: it writes several calls in a turn; False before ``check``.
    """

    def __init__(self, source: Jinja, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        """
        Args:
            source: of the template, as ``resolve_template`` returns it.
            tools: their JSON schemas, at least one.
        """
        self._template, self._drafter = Drafters(source, tokenizer, "assistant").of(True, {})
        self._stops = Stops(tokenizer)
        self._finder = AnswerFinder(self._template, self._stops)
        self._tokenizer, self._tools = tokenizer, tools
        self.takes_several, self.rewrites = False, ""
        self._find_form()

    def prompt(self, messages: Messages) -> list[int]:
        """Return the ids of the messages with the tools, to the generation prompt."""
        return self._encode(self._template.render(self._prepared(messages), self._tools, add_generation_prompt=True))

    def append(self, sampled: Sequence[int], results: Messages) -> list[int] | None:
        """Return the ids that follow a turn: the results, and the generation prompt of the next turn.

        Args:
            sampled: the turn. If it does not end with ``end``, because it was truncated or the model wrote another stop
                token, None is returned: nothing can follow.
            results: messages of all its calls, in their order; one, unless ``takes_several``.
        """
        if list(sampled[-1:]) != [self.end]:
            return None
        # The model may call a tool whose name no template takes.
        return self._following([each | {"name": re.sub(r"[^\w.-]", "_", each["name"])} for each in results])[1:]

    def check(self) -> None:
        """Prove the promises on conversations with one call and several, reasoning and none, and all kinds of results.

        Raises:
            UserError: it says what differs, and in which conversation.
        """
        kinds = [
            (more + after, (reasoning, opening))
            for after, opening in self._openings()
            for more, reasoning in self._reasoning()
        ]
        for name, kind in kinds:
            self._check(f"a call{name}", self._conversation(1, *kind))
        rewrites = self.rewrites
        try:
            for name, kind in kinds:
                self._check(f"two calls{name}", self._conversation(2, *kind))
            self.takes_several = True
        except UserError:
            self.takes_several, self.rewrites = False, rewrites

    def _openings(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """What may come before the question: nothing; a system message and an exchange, or this exchange alone."""
        for after, opening in ((" after a system message and an answer", _OPENING), (" after an answer", _OPENING[1:])):
            with suppress(UserError):
                self.prompt([*opening, _QUESTION])
                return [("", []), (after, opening)]
        return [("", [])]

    def _reasoning(self) -> list[tuple[str, dict[str, str]]]:
        """Whether turns with a call have reasoning, which the generation prompt may open: both, if both can be."""
        prompt = self._template.render([_QUESTION], self._tools, add_generation_prompt=True)
        if not self._drafter.reads_reasoning:
            return [("", {})]
        kinds: list[tuple[str, dict[str, str]]] = [(" without reasoning", {})] * (not OPENED.search(prompt))
        with suppress(UserError):  # some templates write none before a call
            self._finder.find(self._conversation(1, _REASONING, []), 1)
            kinds.append((" and reasoning", _REASONING))
        return kinds or [("", {})]

    def _find_form(self) -> None:
        """Find how it takes a turn with a call: with arguments as JSON or not, with reasoning or not.

        Forms of turns that it does not rewrite are tried first.
        """
        problems = []
        check_shown(self._template, self._template.render([_QUESTION], self._tools), [_QUESTION], self._tools)
        for self._takes_rewritten, self._as_text, self._reason in product(
            (False, True), (False, True), ({}, _REASONING)
        ):
            try:
                self.end = self._following([result_of(ToolCall(_PROBE, {}), "call00000", "?")])[0]
                break
            except UserError as error:
                problems += error.problems
        else:
            raise UserError(problems[0])
        self._takes_rewritten = True

    def _following(self, results: Messages) -> list[int]:
        """The end-of-turn token of a turn with calls, and the ids after it."""
        assert results, "the template writes something else after a turn without results"
        turn = turn_of([ToolCall(each["name"], {}) for each in results], [each["tool_call_id"] for each in results])
        messages = self._prepared([_QUESTION, turn | self._reason, *results])
        text, appended = self._divided("a call", Conversation(self._template, messages, self._tools), 1, len(messages))
        # A tokenizer splits a text at the end-of-turn token before anything else, so this is what the whole would give.
        return self._encode(self._stops.before(text, len(text)) + appended)

    def _divided(self, name: str, conversation: Conversation, i: int, num: int) -> tuple[str, str]:
        """Divide the prompt after ``num`` messages: to the end-of-turn token of turn number ``i``, and the rest."""
        try:
            answer = self._finder.closed(self._finder.find(conversation, i), conversation, i)
        except UserError as error:
            problem = error.problems[0]
            raise self._template.refusal(f"in a trial conversation with {name}, {problem.found}", problem.fix) from None
        text, prompt = answer.text[: answer.end], conversation.render(num, add_generation_prompt=True)
        if not self._stops.ends_turn(text, answer.spans[0][0], answer.end):
            raise self._template.refusal(f"{NO_END}: {text[-20:]!r}")
        if prompt.startswith(text):
            return text, prompt[len(text) :]
        at = next(k for k, (one, two) in enumerate(zip_longest(text, prompt)) if one != two)
        at = max(text.rfind("\n", 0, at) + 1, at - 10)
        changed = f"once results follow {name}: {_shown(text, at)} becomes {_shown(prompt, at)}"
        end = self._end_of_rewritten(conversation, i, prompt, self._stops.before(text, len(text)))
        if not (end and self._takes_rewritten):
            raise self._template.refusal(f"it rewrites earlier text {changed}", KEEPS_TURNS)
        self.rewrites = self.rewrites or changed
        return text, prompt[end:]

    def _end_of_rewritten(self, conversation: Conversation, i: int, prompt: str, stop: str) -> int:
        """Where turn number ``i`` ends in ``prompt``, in which turns are rewritten; 0 if not they alone are.

        ``stop``: the end-of-turn token. It is counted, because what is before it may have changed.
        """
        num_ends = end = 0
        for k, message in enumerate(conversation.messages[: i + 1]):
            if message.get("tool_calls"):
                before, bare = conversation.render(k, add_generation_prompt=True), conversation.render(k)
                header = before.removeprefix(bare) if before.startswith(bare) else ""
                # It may open reasoning, or hold an empty block of it, which is part of the turn as well.
                cuts = [tag.start() - len(header) for tag in TAG.finditer(header) if header[: tag.start()].strip()]
                start = _after(before, stop, num_ends)
                if not any(prompt.startswith(before[start:cut], end) for cut in (None, *cuts)):
                    return 0
                num_ends = before.count(stop) + 1
                end = _after(prompt, stop, num_ends)
        return end

    def _check(self, name: str, conversation: Conversation) -> None:
        messages = conversation.messages
        turns = [i for i, message in enumerate(messages) if message.get("tool_calls")]
        for i, num in zip(turns, [*turns[1:], len(messages)], strict=True):
            results = messages[i + 1 : num]
            text, rest = self._divided(name, conversation, i, num)
            check_shown(self._template, rest, results, None)
            found, wanted = self._encode(text), self._encode(text + rest)
            end, *ids = self._following(results)
            if not found[-1] == end == self.end or found + ids != wanted:
                pairs = enumerate(zip_longest(found + ids, wanted))
                at = next((k for k, (one, two) in pairs if one != two), 0)
                decode = self._tokenizer.decode
                raise self._template.refusal(
                    f"the results after {name} are other tokens where the whole conversation is encoded: "
                    f"{decode((found + ids)[at : at + 8])!r} becomes {decode(wanted[at : at + 8])!r}",
                    KEEPS_TURNS,
                )

    def _conversation(self, num_calls: int, reasoning: dict[str, str], opening: Messages) -> Conversation:
        """A question after ``opening``, and turns with ``num_calls`` and their results."""
        messages = [*opening, _QUESTION]
        for k in range(0, len(_CONTENTS), num_calls):
            calls = [ToolCall(f"{_PROBE}{n % 2}", _ARGUMENTS[n % 3]) for n in range(k, k + num_calls)]
            ids = [f"call{n:05}" for n in range(k, k + num_calls)]  # Mistral's templates take nine letters and digits
            messages += [turn_of(calls, ids) | reasoning, *map(result_of, calls, ids, _CONTENTS[k:])]
        return Conversation(self._template, self._prepared(messages), self._tools)

    def _encode(self, text: str) -> list[int]:
        text = text.encode(errors="replace").decode()  # a tool may return half of a surrogate pair
        return list(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def _prepared(self, messages: Messages) -> list[dict[str, Any]]:
        taken = [self._drafter.prepared(message) for message in messages]
        return [with_json_arguments(message) for message in taken] if self._as_text else taken


def _after(text: str, stop: str, num: int) -> int:
    """Where ``stop`` ends for the ``num``-th time in ``text``."""
    return sum(len(piece) + len(stop) for piece in text.split(stop)[:num])


def _shown(text: str, at: int) -> str:
    return repr(text[at : at + 40]) if at < len(text) else "the end"
