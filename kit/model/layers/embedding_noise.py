"""NEFTune: uniform noise on the input embeddings in training.

Promises: the noise of a sample depends only on the seed, the step and the sample. So it is the same on every topology,
in a pack and after a resume. Padding gets none, and evaluations have none.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kit.system.errors import UserError

# Of a sample in a micro-batch of B rows with T tokens: its first position b * T + t, its tokens, and its number, which
# it has on every topology.
Segment = tuple[int, int, int]


@dataclass(frozen=True)
class EmbeddingNoise:
    """The noise of one step.

    Attributes:
        alpha: the setting ``neftune_noise_alpha``.
        step: counted from 0.
    """

    alpha: float
    seed: int
    step: int

    def add(self, segments: Sequence[Segment], embeddings: torch.Tensor) -> torch.Tensor:
        """Add noise to embeddings [B, T, d], between -a and a = alpha / sqrt(L d) for a sample of L tokens.

        Jain et al. 2023, https://arxiv.org/abs/2310.05914, algorithm 1; L without padding, as its authors computed it.
        """
        noise = torch.zeros_like(embeddings).flatten(0, 1)  # [B * T, d]
        generator = torch.Generator(embeddings.device)
        for start, num_tokens, number in segments:
            # The fourth number tells these random numbers from those of dropout.
            (seed,) = np.random.SeedSequence([self.seed, self.step, number, 1]).generate_state(1, np.uint64)
            generator.manual_seed(int(seed) >> 1)
            bound = self.alpha / math.sqrt(num_tokens * embeddings.shape[-1])
            noise[start : start + num_tokens].uniform_(-bound, bound, generator=generator)
        return embeddings + noise.view_as(embeddings)


def neftune(alpha: float, seed: int, step: int) -> EmbeddingNoise | None:
    """Return the noise of a step; None if ``alpha`` is 0."""
    return EmbeddingNoise(alpha, seed, step) if alpha else None


@contextmanager
def changed_embeddings(model: Any, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Iterator[None]:
    """In the ``with`` block, ``model`` computes with ``change(embeddings)``, [B, T, d]; None: as without this.

    Raises:
        UserError: the model's forward did not call its input embeddings once.
    """
    if change is None:
        yield
        return
    num_calls = 0

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return change(output)

    handle = model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
    if num_calls != 1:
        found = f"{type(model).__name__} computes its input embeddings {num_calls} times, where the noise needs one"
        raise UserError("neftune_noise_alpha", found, fix="--neftune_noise_alpha 0")
