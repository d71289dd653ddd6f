"""Unpaired preference (KTO): an answer to a prompt, and whether it is a good one."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kit.data.chat.formats import Format, Sample, template_inputs
from kit.data.chat.media_parts import MEDIA_COLUMNS
from kit.data.chat.preferences import answers_to_one_prompt
from kit.data.kinds.kind import Sequences, Stored
from kit.data.kinds.one_prompt import INPUTS, OnePrompt, first_target
from kit.system.errors import UserError

PROMPT_LENGTH, LABEL = 2, 3  # columns of the values


def _read(values: Mapping[str, Any]) -> Sample:
    label = values["label"]
    if isinstance(label, str) and label.strip().lower() in ("true", "false"):  # a cell of a table
        label = label.strip().lower() == "true"
    if not isinstance(label, bool):
        raise UserError("label", repr(label)[:80], "true (a good answer) or false")
    return answers_to_one_prompt(values, UnpairedPreferenceRows.answers) | {"label": label} | template_inputs(values)


class UnpairedPreferenceRows(OnePrompt):
    """Other values: the tokens of the prompt, and whether the answer is a good one."""

    formats = (
        Format(
            ("label", "completion"), _read, optional=(*INPUTS, *MEDIA_COLUMNS), all_or_none=("prompt", "instruction")
        ),
    )
    objective = "--objective kto takes unpaired preferences"
    answers = ("completion",)
    has_mismatched = True
    too_few = "at least two samples: kto estimates the KL term on mismatched prompt-completion pairs"

    def values(self, sample: Sample, sequences: Sequences) -> list[float]:
        """See ``RowKind``."""
        return [*super().values(sample, sequences), first_target(sequences[0]), float(sample["label"])]

    def per_sequence(self, table: Stored, members: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """See ``RowKind``: ``labels``, bool [n]."""
        return {"labels": table.values[members, LABEL].astype(bool)}

    def hashes(self, table: Stored, of_ids: np.ndarray) -> np.ndarray:
        """See ``RowKind``: the same answer with another label is no repetition."""
        return of_ids ^ table.values[:, LABEL].astype(np.uint64)

    def summary(self, table: Stored) -> list[str]:
        """See ``RowKind``."""
        (line,) = super().summary(table)
        num_good, num = int(table.values[:, LABEL].sum()), len(table)
        lines = [f"{line}; good answers: {num_good}, bad ones: {num - num_good}"]
        if num_good in (0, num):
            missing = "bad" if num_good else "good"
            lines.append(f"warning: there is no {missing} answer, and kto needs both")
        return lines

    def is_bad(self, table: Stored, i: int, name: str) -> bool:
        """See ``RowKind``."""
        return not table.values[i, LABEL]

    def about(self, table: Stored, i: int) -> str:
        """See ``RowKind``."""
        return f", label {str(bool(table.values[i, LABEL])).lower()}"


KIND = UnpairedPreferenceRows
