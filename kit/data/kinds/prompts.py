"""Rows for GRPO: prompts with a reference answer, as rows for SFT have them, or alone.

A prompt alone is a sample without ``completion``. All its weights are 0, and its answer span is empty, at its end.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kit.data.chat.formats import Format, Sample, template_inputs
from kit.data.chat.messages import after_system, are_messages, check_no_system, check_text, read_messages
from kit.data.kinds.answers import (
    INPUTS,
    OF_QUESTION,
    AnswerRows,
    from_conversations,
    from_instruction,
    from_messages,
    question,
)
from kit.data.kinds.kind import Limits, Sequences, Stored
from kit.system.errors import UserError


def _from_chat(make: Callable[..., Sample], values: Mapping[str, Any]) -> Sample:
    """A conversation, which is a prompt alone if its last turn is not the assistant's."""
    sample = make(values, needs_answer=False)
    if sample["messages"][-1]["role"] != "assistant":
        sample["prompt"] = sample.pop("messages")
    return sample


def _from_prompt(values: Mapping[str, Any]) -> Sample:
    prompt = values["prompt"]
    if not (isinstance(prompt, list) or are_messages(prompt)):
        check_no_system(values)
        return {"prompt": check_text("prompt", prompt)} | template_inputs(values)
    messages = read_messages("prompt", prompt, needs_answer=False)
    if messages[-1]["role"] == "assistant":
        raise UserError("prompt", "an assistant turn, last", "a turn of the user or a tool, which the model answers")
    return {"prompt": after_system(values, messages)} | template_inputs(values)


def _from_question(values: Mapping[str, Any]) -> Sample:
    return {"prompt": question(values)} | template_inputs(values)


_MAKES = {
    "messages": partial(_from_chat, from_messages),
    "conversations": partial(_from_chat, from_conversations),
}


def _is_alone(sample: Sample) -> bool:
    return "prompt" in sample and "completion" not in sample


class EvaluatedPromptRows(AnswerRows):
    """Prompts to evaluate on. Those with an answer are truncated like rows for SFT, whose loss is measured."""

    formats = tuple(
        replace(each, make=_MAKES.get(each.columns[0], each.make), are_prompts=True)
        for each in (
            *AnswerRows.formats,
            Format(("instruction", "completion"), from_instruction, optional=OF_QUESTION, is_chat=True),
            Format(("prompt",), _from_prompt, optional=("system", *INPUTS), all_or_none=("completion",)),
            Format(("instruction",), _from_question, optional=OF_QUESTION, all_or_none=("output", "completion")),
        )
    )
    objective = "--objective grpo takes prompts, also alone, and rewards"
    token_name = "in answers"

    def cut(self, sequences: Sequences, limits: Limits) -> tuple[list[Sequences], str]:
        """See ``RowKind``. A prompt alone is left out."""
        return super().cut(sequences, limits) if any(sequences[0].weights) else ([], "")

    def weighted(self, sample: Sample, sequences: Sequences) -> Sequences | None:
        """See ``RowKind``."""
        return sequences if _is_alone(sample) else super().weighted(sample, sequences)

    def values(self, sample: Sample, sequences: Sequences) -> list[float]:
        """See ``RowKind``."""
        return [len(sequences[0].input_ids)] * 2 if _is_alone(sample) else super().values(sample, sequences)

    def summary(self, table: Stored) -> list[str]:
        """See ``RowKind``."""
        num_alone = int((table.num_targets == 0).sum())
        return super().summary(table) + ([f"{num_alone} samples have no reference answer"] if num_alone else [])


class PromptRows(EvaluatedPromptRows):
    """Prompts for rollouts. None is truncated: whether a completion has room is known later."""

    is_cut = False


KIND = EvaluatedPromptRows
