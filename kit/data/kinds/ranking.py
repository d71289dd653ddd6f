"""Rows for reward models: preference pairs with a margin, and queries with positive and negative texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from kit.data.chat.formats import Format, Sample
from kit.data.chat.messages import are_messages, check_text
from kit.data.chat.preferences import answers_to_one_prompt
from kit.data.chat.tokens import Encoded
from kit.data.kinds.kind import Limits, Sequences
from kit.data.kinds.one_prompt import INPUTS, OnePrompt
from kit.data.kinds.texts import TextRows, negatives, number
from kit.system.errors import Problem, UserError


def _read(values: Mapping[str, Any]) -> Sample:
    """Optionally with how far they are apart."""
    margin = values.get("margin")
    more = {"margin": 0.0 if margin is None else number("margin", margin)}
    if "query" in values:
        query = check_text("query", values["query"])
        texts = {"positive": values["positive"], **negatives(values)}
        if len(texts) == 1:
            raise UserError("negative", "none", "at least one")
        return {"plain": [[query, check_text(name, text)] for name, text in texts.items()], **more}
    answers = [values[name] for name in OnePrompt.answers]
    has_prompt = "prompt" in values or "instruction" in values
    if not has_prompt and all(isinstance(each, str) and not are_messages(each) for each in answers):
        return {
            "plain": [[check_text(name, each)] for name, each in zip(OnePrompt.answers, answers, strict=True)],
            **more,
        }
    return answers_to_one_prompt(values, OnePrompt.answers) | more


class RankingRows(TextRows):
    """Sequence 0 is the chosen or positive text, 1 the rejected or negative one. Value: the margin."""

    formats = (
        Format(("rejected", "chosen"), _read, optional=("margin", *INPUTS), all_or_none=("prompt", "instruction")),
        Format(("negative", "query", "positive"), _read, optional=("margin",)),
    )
    objective = "--objective reward takes preference pairs"
    answers = OnePrompt.answers

    def parts(self, sample: Sample) -> list[Sample]:
        """See ``RowKind``."""
        return super().parts(sample) if "plain" in sample else OnePrompt().parts(sample)

    def join(self, sample: Sample, encoded: Sequence[list[Encoded] | Problem]) -> list[Sequences] | Problem:
        """See ``RowKind``: the better text with each worse one."""
        if "plain" not in sample:
            return OnePrompt().join(sample, encoded)
        joined = super().join(sample, encoded)
        if isinstance(joined, Problem):
            return joined
        better, *worse = joined[0]
        if any(each.input_ids == better.input_ids for each in worse):
            return Problem("", "the rejected text has the same tokens as the chosen one", "another text")
        return [(better, each) for each in worse]

    def cut(self, sequences: Sequences, limits: Limits) -> tuple[list[Sequences], str]:
        """See ``RowKind``. Texts that differ only in the truncated part are dropped."""
        if 0.0 in sequences[0].weights:  # of a prompt
            return OnePrompt().cut(sequences, limits)
        (texts,), remark = super().cut(sequences, limits)
        return ([] if texts[0].input_ids == texts[1].input_ids else [texts]), remark

    def values(self, sample: Sample, sequences: Sequences) -> list[float]:
        """See ``RowKind``."""
        return [sample["margin"]]


KIND = RankingRows
