"""The noise of a sample is that of NEFTune, and depends on the seed, the step and the sample only."""

import math

import numpy as np
import pytest
import torch

from kit.data.feed.batches import Collator
from kit.model.embedding_noise import EmbeddingNoise

SIZE = 16
NOISE = EmbeddingNoise(5.0, seed=3, step=7)


class Rows:
    """Samples of 3, 9 and 5 tokens."""

    labels = references = None
    dataset_ids = np.zeros(3, int)

    def sequences(self, i):
        return [(np.arange(1, (3, 9, 5)[i] + 1), np.ones((3, 9, 5)[i]))]


def noise_by_sample(items, packing=False, noise=NOISE):
    """The noise of each sample [L, d], by its number, and that of the padding."""
    micro_batch = Collator(4, 0, packing, 32).collate(Rows(), [np.array(item) for item in items])
    added = noise.add(micro_batch.segments, torch.zeros(*micro_batch.input_ids.shape, SIZE)).flatten(0, 1)
    of_samples = {number: added[start : start + length].clone() for start, length, number in micro_batch.segments}
    for start, length, _ in micro_batch.segments:
        added[start : start + length] = 0
    return of_samples, added


def test_it_fills_what_the_paper_allows_and_leaves_padding_alone():
    of_samples, padding = noise_by_sample([[0], [1], [2]])
    assert padding.any().item() is False
    for sample, num_tokens in enumerate((3, 9, 5)):
        bound = 5 / math.sqrt(num_tokens * SIZE)
        largest = of_samples[sample].abs().max().item()
        assert 0.9 * bound < largest <= bound and abs(of_samples[sample].mean().item()) < bound / 4


@pytest.mark.parametrize(("items", "packing"), [([[1], [0]], False), ([[2, 1, 0]], True)])
def test_a_sample_has_the_same_noise_in_any_micro_batch_and_in_a_pack(items, packing):
    alone, _ = noise_by_sample([[0], [1], [2]])
    found, _ = noise_by_sample(items, packing)
    for sample, noise in found.items():
        assert torch.equal(noise, alone[sample])
