"""Mismatched prompt-completion pairs, on which KTO estimates its KL term against the reference model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kit.data.feed.order import MISMATCH, permutation
from kit.data.kinds.unpaired_preference import PROMPT_LENGTH
from kit.data.samples.records import Table
from kit.data.samples.samples import Samples


class Mismatched(Table):
    """Each sample's prompt with the answer to the prompt of another sample, its partner.

    The partner depends on the data and the seed only: so it is the same on any number of ranks and in every epoch, and
    what the reference makes of it can be computed before the first step. A sequence that would be longer than
    ``max_length`` tokens is cut at its end.
    """

    def __init__(self, samples: Samples, seed: int, max_length: int) -> None:
        self._samples, self._max_length = samples, max_length
        order = permutation(len(samples), seed, MISMATCH)
        self.partners = np.empty_like(order)
        self.partners[order] = np.roll(order, -1)
        self._prompt_lengths = samples.values[:, PROMPT_LENGTH].astype(np.int64)
        answers = samples.lengths - self._prompt_lengths
        records = {
            "length": np.minimum(self._prompt_lengths + answers[self.partners], max_length),
            "num_targets": samples.num_targets[self.partners],  # before it is cut
            "target_weight": samples.target_weights[self.partners],
        }
        super().__init__(records, samples.dataset_ids, samples.kind)

    def per_sequence(self, members: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Those of the samples; the reference's log-probabilities are those of the other answers."""
        return self._samples.per_sequence(members, numbers + 1)

    def media_inputs(self, input_ids: np.ndarray, segments: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        """Those of the samples: all of an image stands in the prompt."""
        return self._samples.media_inputs(input_ids, segments)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """See ``Table``."""
        prompt, answer = slice(0, self._prompt_lengths[i]), slice(self._prompt_lengths[self.partners[i]], None)
        own, other = self._samples[i], self._samples[int(self.partners[i])]
        ids, weights = (np.concatenate([mine[prompt], theirs[answer]]) for mine, theirs in zip(own, other, strict=True))
        return ids[: self._max_length], weights[: self._max_length]
