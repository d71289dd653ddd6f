"""Tokens are sampled with their probabilities, each completion by its own random numbers."""

import numpy as np
import torch

from kit.model.sampling import Sampling, sampling_arguments


def draw(scores, numbers, seed=1, **changes):
    """The token that is drawn for each row, after the warpers of ``sampling_arguments``."""
    sampling = Sampling(**{"temperature": 1.0, **changes})
    (_, processors) = sampling_arguments(sampling, seed, numbers, prompt_length=3).values()
    scores = torch.tensor(scores).expand(len(numbers), -1)
    return processors(torch.zeros(len(numbers), 3, dtype=torch.long), scores).argmax(dim=-1)


def test_frequencies_are_the_probabilities():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens = draw(probabilities.log().tolist(), [(i, 0) for i in range(4000)])
    shares = np.bincount(tokens, minlength=4) / 4000
    assert np.abs(shares - probabilities.numpy()).max() < 0.03
    sharper = np.bincount(draw(probabilities.log().tolist(), [(i, 0) for i in range(4000)], temperature=0.5)) / 4000
    assert abs(sharper[0] - 0.25 / 0.365) < 0.03  # p ** 2, divided by their sum


def test_a_row_does_not_depend_on_the_others():
    scores = torch.zeros(50).tolist()
    together = draw(scores, [(7, 0), (8, 0), (8, 1)])
    assert [draw(scores, [pair]).item() for pair in [(7, 0), (8, 0), (8, 1)]] == together.tolist()
    assert draw(scores, [(7, 0)], seed=2) != together[0]


def test_top_k_top_p_and_min_p_cut_the_unlikely_tokens_and_the_others_keep_their_proportions():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    for cut, kept in (
        ({"top_k": 2}, 2),
        ({"top_p": 0.65}, 2),
        ({"top_p": 0.75}, 3),
        ({"min_p": 0.4}, 3),
        ({"min_p": 0.4, "temperature": 0.5}, 2),  # of p ** 2
        ({"top_k": 9}, 5),
    ):
        tokens = draw(probabilities.log().tolist(), [(i, 0) for i in range(4000)], **cut)
        wanted = probabilities[:kept] ** (1 / cut.get("temperature", 1))
        shares = np.bincount(tokens, minlength=5)[:kept] / 4000
        assert tokens.max() == kept - 1, cut
        assert np.abs(shares - (wanted / wanted.sum()).numpy()).max() < 0.03, cut
