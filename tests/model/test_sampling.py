"""Tokens are sampled with their probabilities, each completion by its own random numbers."""

import numpy as np
import torch

from kit.model.sampling import sampling_arguments


def draw(scores, numbers, **changes):
    """The token that is drawn for each row, after the warpers of ``sampling_arguments``."""
    asked = {"temperature": 1.0, "top_p": None, "seed": 1, **changes}
    (_, processors) = sampling_arguments(**asked, numbers=numbers, prompt_length=3).values()
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
