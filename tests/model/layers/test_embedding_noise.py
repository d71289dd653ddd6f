"""The noise of a sample is that of NEFTune, and depends on the seed, the step and the sample only."""

import math

import torch

from kit.model.layers.embedding_noise import EmbeddingNoise

SIZE = 16
LENGTHS = (3, 9, 5)


def noise_by_sample(*rows, seed=3):
    """The noise of each sample [L, d], by its number, and that of the padding; ``rows`` have numbers of samples."""
    segments = []
    for row, numbers in enumerate(rows):
        starts = [20 * row + sum(LENGTHS[each] for each in numbers[:i]) for i in range(len(numbers))]
        segments += [(start, LENGTHS[number], number) for start, number in zip(starts, numbers, strict=True)]
    noise = EmbeddingNoise(5.0, seed=seed, step=7)
    added = noise.add(segments, torch.zeros(len(rows), 20, SIZE)).flatten(0, 1)
    of_samples = {number: added[start : start + length].clone() for start, length, number in segments}
    for start, length, _ in segments:
        added[start : start + length] = 0
    return of_samples, added


def test_it_fills_what_the_paper_allows_and_leaves_padding_alone():
    of_samples, padding = noise_by_sample([0], [1], [2])
    assert not padding.any()
    for sample, num_tokens in enumerate(LENGTHS):
        bound = 5 / math.sqrt(num_tokens * SIZE)
        largest = of_samples[sample].abs().max().item()
        assert 0.9 * bound < largest <= bound and abs(of_samples[sample].mean().item()) < bound / 4


def test_a_sample_has_the_same_noise_in_any_micro_batch_and_in_a_pack():
    alone, _ = noise_by_sample([0], [1], [2])
    for rows in ([[1], [0]], [[2, 1, 0]]):
        found, _ = noise_by_sample(*rows)
        assert all(torch.equal(noise, alone[sample]) for sample, noise in found.items())
    assert not torch.equal(noise_by_sample([0], seed=4)[0][0], alone[0])
