"""Preference pairs: a chosen and a rejected answer to one prompt."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kit.data.chat.formats import Format, Sample, template_inputs
from kit.data.chat.media_parts import MEDIA_COLUMNS
from kit.data.chat.preferences import answers_to_one_prompt
from kit.data.kinds.kind import Sequences, Stored
from kit.data.kinds.one_prompt import INPUTS, OnePrompt


def _read(values: Mapping[str, Any]) -> Sample:
    return answers_to_one_prompt(values, OnePrompt.answers) | template_inputs(values)


class PreferenceRows(OnePrompt):
    """Sequence 0 is the prompt with the chosen answer, whose weight is the last value; 1 is with the rejected one."""

    formats = (
        Format(
            ("chosen", "rejected"), _read, optional=(*INPUTS, *MEDIA_COLUMNS), all_or_none=("prompt", "instruction")
        ),
    )
    objective = "--objective dpo takes preference pairs"
    compares_answers = True

    def values(self, sample: Sample, sequences: Sequences) -> list[float]:
        """See ``RowKind``."""
        weights = np.array(sequences[0].weights[1:], np.float32)
        return [*super().values(sample, sequences), float(weights.sum(dtype=np.float64))]

    def chosen_weight(self, table: Stored, indices: np.ndarray) -> float:
        """See ``RowKind``."""
        return float(table.values[indices, -1].sum())


KIND = PreferenceRows
