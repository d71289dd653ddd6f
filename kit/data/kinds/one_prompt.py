"""Preference rows: answers to one prompt, encoded and truncated alike. Pure.

Promises:

- The prompt has the same tokens before all answers, and the answers differ. What does not is a problem.
- Cutting takes tokens of the prompt, the same before all answers. No answer is cut: a sample that is too long for that
  is left out.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from kit.data.chat.formats import Sample
from kit.data.chat.tokens import Encoded
from kit.data.kinds.kind import Limits, RowKind, Sequences
from kit.system.errors import Problem

INPUTS = ("input", "system", "tools", "chat_template_kwargs")  # columns of their formats
PROMPT_CUT = "the start of the prompt was truncated, so that no answer is"


class OnePrompt(RowKind):
    """A prompt and its answers: the keys ``answers`` of a sample."""

    answers: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    def parts(self, sample: Sample) -> list[Sample]:
        """See ``RowKind``: the prompt with each of its answers."""
        shared = {key: value for key, value in sample.items() if key not in (*self.answers, "label")}
        return [{**shared, "completion": sample[name]} for name in self.answers]

    def join(self, sample: Sample, encoded: Sequence[list[Encoded] | Problem]) -> list[Sequences] | Problem:
        """See ``RowKind``."""
        sequences: Sequences = ()
        for name, answer in zip(self.answers, encoded, strict=True):
            if isinstance(answer, Problem):
                return answer
            if len(answer) > 1:
                found = "the chat template rewrites earlier turns, so these answers have no prompt in common"
                return Problem(name, found, "one answer", "make a row of each, with the turns before it as the prompt")
            if not any(answer[0].weights[1:]):
                return Problem(name, "nothing of it is supervised", "an answer with a weight")
            sequences += (answer[0],)
        first, *others = sequences
        num_prompt = first_target(first)
        for i, (name, other) in enumerate(zip(self.answers[1:], others, strict=True), 1):
            if num_prompt != first_target(other) or first.input_ids[:num_prompt] != other.input_ids[:num_prompt]:
                found = f"the prompt before it has other tokens than before the {self.answers[0]} answer"
                fix = "the same prompt; masked turns are part of it, up to an answer"
                return Problem(name, found, fix)
            same = [self.answers[k] for k in range(i) if sequences[k].input_ids == other.input_ids]
            if same:
                return Problem(name, f"the same tokens as {same[0]}", "another answer")
        # Nothing predicts the first token of a sequence.
        return [(first, *(replace(each, weights=[0.0, *each.weights[1:]]) for each in others))]

    def cut(self, sequences: Sequences, limits: Limits) -> tuple[list[Sequences], str]:
        """See ``RowKind``: cut tokens of the prompt until the longest sequence fits, unless no prompt is left."""
        num_over = max(len(each.input_ids) for each in sequences) - limits.max_length
        num_first = 1 if sequences[0].input_ids[0] == limits.bos else 0  # BOS stays first
        # At least one token must predict the first of the answer.
        if num_over > first_target(sequences[0]) - max(num_first, 1):
            return [], ""
        start = num_first + num_over
        shorter = tuple(
            Encoded(
                each.input_ids[:num_first] + each.input_ids[start:], each.weights[:num_first] + each.weights[start:]
            )
            for each in sequences
        )
        return [shorter], PROMPT_CUT


def first_target(encoded: Encoded) -> int:
    """Return the number of tokens before the first supervised one that has a token before it."""
    return next(i for i, weight in enumerate(encoded.weights) if i and weight)
