"""Rows for SFT and distillation: conversations, prompt-completion, texts, and token ids."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from kit.data.chat.formats import IGNORED, MAX_ID, Format, Sample, template_inputs
from kit.data.chat.media_parts import MEDIA_COLUMNS
from kit.data.chat.messages import (
    SPEAKERS,
    Message,
    after_system,
    are_messages,
    check_no_system,
    check_text,
    parsed,
    read_messages,
    system_message,
)
from kit.data.chat.tokens import Encoded
from kit.data.kinds.kind import START_CUT, Limits, RowKind, Sequences
from kit.system.errors import Problem, UserError, kind


def from_messages(values: Mapping[str, Any], needs_answer: bool = True) -> Sample:
    """The column ``messages``; ``needs_answer`` as in ``read_messages``."""
    messages = read_messages("messages", values["messages"], needs_answer=needs_answer)
    return {"messages": messages} | template_inputs(values)


def from_conversations(values: Mapping[str, Any], needs_answer: bool = True) -> Sample:
    """The column ``conversations``; ``needs_answer`` as in ``read_messages``."""
    messages = read_messages("conversations", values["conversations"], SPEAKERS, needs_answer=needs_answer)
    return {"messages": after_system(values, messages)} | template_inputs(values)


def _from_pair(values: Mapping[str, Any]) -> Sample:
    prompt, completion = values["prompt"], values["completion"]
    if isinstance(prompt, list) or are_messages(prompt):
        if isinstance(completion, str) and not are_messages(completion):
            completion = [{"role": "assistant", "content": completion}]
        prompt = after_system(values, read_messages("prompt", prompt, needs_answer=False))
        completion = read_messages("completion", completion, may_begin=False)
    else:
        check_text("prompt", prompt)
        check_text("completion", completion)
        check_no_system(values)
    return {"prompt": prompt, "completion": completion} | template_inputs(values)


def from_instruction(values: Mapping[str, Any]) -> Sample:
    """The columns ``instruction`` and ``output``; the latter may be ``completion``, as with ``prompt``."""
    name = "output" if "output" in values else "completion"
    answer = {"role": "assistant", "content": check_text(name, values[name])}
    if reasoning := values.get("reasoning_content"):
        answer["reasoning_content"] = check_text("reasoning_content", reasoning)
    return {"messages": [*question(values), answer]} | template_inputs(values)


def question(values: Mapping[str, Any]) -> list[Message]:
    """The column ``instruction`` as a message, after those of ``system`` and ``history``."""
    asked = {"role": "user", "content": check_text("instruction", values["instruction"])}
    return [*system_message(values), *_history(values), asked]


def _from_media(column: str, values: Mapping[str, Any]) -> Sample:
    """Answers to images or audio alone, such as captions and transcripts."""
    if not values[column]:
        expected = "an image" if column == "images" else "audio"
        raise UserError(column, "none", f"{expected}, which output describes")
    answer = {"role": "assistant", "content": check_text("output", values["output"])}
    return {"messages": [*system_message(values), {"role": "user", "content": ""}, answer]}


def _history(values: Mapping[str, Any]) -> list[Message]:
    """The column ``history``, a list of [question, answer] pairs, as messages; an empty list if there is none."""
    history = parsed("history", values.get("history") or [])
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise UserError("history", kind(history), "a list of [question, answer] pairs")
    return [
        {"role": role, "content": check_text(f"history[{i}]", text)}
        for i, pair in enumerate(history)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _from_token_ids(values: Mapping[str, Any]) -> Sample:
    ids = values["input_ids"]
    if not isinstance(ids, list) or not ids:
        raise UserError("input_ids", "empty" if ids == [] else kind(ids), "a list of ids")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= MAX_ID:
        i = next(i for i, value in enumerate(ids) if type(value) is not int or not 0 <= value < MAX_ID)
        raise UserError(f"input_ids[{i}]", repr(ids[i])[:80], "a whole number of at least 0")
    if "labels" not in values:
        return {"input_ids": ids}
    labels = values["labels"]
    if not isinstance(labels, list) or len(labels) != len(ids):
        found = f"{len(labels)} of them" if isinstance(labels, list) else kind(labels)
        raise UserError("labels", found, f"a list of {len(ids)}, as many as input_ids")
    for i, (label, id_) in enumerate(zip(labels, ids, strict=True)):
        if type(label) is not int or label not in (id_, IGNORED):
            expected = f"{IGNORED}, or {id_} as in input_ids: labels are not shifted"
            raise UserError(f"labels[{i}]", repr(label)[:80], expected)
    return {"input_ids": ids, "labels": labels}


INPUTS = ("tools", "chat_template_kwargs", *MEDIA_COLUMNS)
OF_QUESTION = ("input", "system", "history", "chat_template_kwargs", *MEDIA_COLUMNS)


class AnswerRows(RowKind):
    """A sample is one sequence; a row is several where a chat template rewrites earlier turns."""

    formats: ClassVar[tuple[Format, ...]] = (
        Format(("messages",), from_messages, optional=INPUTS, is_chat=True),
        Format(("conversations",), from_conversations, optional=("system", *INPUTS), is_chat=True),
        Format(("prompt", "completion"), _from_pair, optional=("system", *INPUTS)),
        Format(("instruction", "output"), from_instruction, optional=(*OF_QUESTION, "reasoning_content"), is_chat=True),
        Format(("input_ids",), _from_token_ids, all_or_none=("labels",)),
        Format(("text",), lambda values: {"text": check_text("text", values["text"])}),
        *(
            Format((column, "output"), partial(_from_media, column), optional=("system",), is_chat=True)
            for column in MEDIA_COLUMNS
        ),
    )
    objective = "--objective sft takes answers to imitate"
    is_demonstration = True

    def join(self, sample: Sample, encoded: Sequence[list[Encoded] | Problem]) -> list[Sequences] | Problem:
        """See ``RowKind``."""
        (result,) = encoded
        return result if isinstance(result, Problem) else [(each,) for each in result]

    def cut(self, sequences: Sequences, limits: Limits) -> tuple[list[Sequences], str]:
        """See ``RowKind``."""
        ids, weights = sequences[0].input_ids, sequences[0].weights
        pieces: list[Sequences] = [
            (Encoded([i for kept in slices for i in ids[kept]], [w for kept in slices for w in weights[kept]]),)
            for slices in _pieces(ids, limits)
        ]
        return pieces, START_CUT if limits.strategy == "keep_end" else ""


ANSWER_ROWS = AnswerRows()


def _pieces(ids: Sequence[int], limits: Limits) -> list[list[slice]]:
    """What of a sample that is too long is kept: for each piece, the slices that it joins."""
    limit = limits.max_length
    if limits.strategy == "split":
        # Neighbouring pieces share a token, so that every token except the very first is a target once.
        return [[slice(i, i + limit)] for i in range(0, len(ids) - 1, limit - 1)]
    if limits.strategy == "keep_end":
        num_first = 1 if ids[0] == limits.bos else 0  # tokens kept of the start: BOS stays first
        return [[slice(0, num_first), slice(len(ids) - limit + num_first, len(ids))]]
    return [[slice(0, limit)]]


KIND = AnswerRows
