"""Sampling from a model: temperature, top_k, nucleus sampling (top_p), min_p, and a seed for each completion.

Promises: a completion depends on the seed, its own number and the model, not on the batch or the rank. Without a
temperature decoding is greedy, and ``generate`` gets its usual arguments.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class Sampling(NamedTuple):
    """From which tokens one is sampled."""

    temperature: float | None  # divides logits; None: greedy decoding
    top_p: float | None = None  # nucleus sampling: the likeliest tokens with this total probability; None or 1: all
    top_k: int = 0  # this many of the likeliest; 0: all
    min_p: float = 0.0  # those with this share of the likeliest one's probability; 0: all


def sampling_arguments(
    sampling: Sampling, seed: int, numbers: Sequence[tuple[int, ...]], prompt_length: int
) -> dict[str, Any]:
    """Return the arguments of ``generate`` that choose the tokens.

    Args:
        numbers: for each row of the call the numbers that identify the completion, such as sample and draw.
        prompt_length: tokens in front of the first generated one, padding included.
    """
    if sampling.temperature is None:
        return {"do_sample": False}
    kept = warpers(sampling)
    drawing = SeededSampler(seed, numbers, prompt_length)
    # ``do_sample`` would draw from one generator for the whole batch. The processors leave a single token to choose.
    return {"do_sample": False, "logits_processor": LogitsProcessorList([*kept, drawing])}


def warpers(sampling: Sampling) -> list[LogitsProcessor]:
    """Return what divides logits by a temperature, and sets those of unlikely tokens to -inf, in the usual order."""
    temperature, top_p, top_k, min_p = sampling
    found: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)] if temperature not in (None, 1) else []
    found += [TopKLogitsWarper(top_k)] if top_k else []
    found += [TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1 else []
    return found + ([MinPLogitsWarper(min_p)] if min_p else [])


class SeededSampler(LogitsProcessor):
    """Samples a token of each row from its probabilities, by one random number per row and position."""

    def __init__(self, seed: int, numbers: Sequence[tuple[int, ...]], prompt_length: int) -> None:
        """See ``sampling_arguments``."""
        self._keys = [(seed, *pair) for pair in numbers]
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return ``scores`` [B, V] with 0 for the token that is drawn, and -inf for all others."""
        position = input_ids.shape[1] - self._prompt_length
        # As ``default_rng((*key, position)).random()``, without the generator.
        drawn = [(np.random.PCG64((*key, position)).random_raw() >> 11) * 2.0**-53 for key in self._keys]
        # The token whose part of the line from 0 to 1 holds the drawn number, in float64: each likely one has a part.
        device = scores.device if scores.device.type != "mps" else torch.device("cpu")  # which has no float64
        ends = scores.to(device, torch.float64).softmax(dim=-1).cumsum(dim=-1)  # [B, V]
        where = torch.tensor(drawn, dtype=torch.float64, device=device)[:, None] * ends[:, -1:]
        tokens = torch.searchsorted(ends, where, right=True).clamp_(max=scores.shape[-1] - 1).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)  # type: ignore[return-value]
