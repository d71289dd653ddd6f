"""Batched generation, for evaluations and rollouts."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from kit.data.chat.tokens import ImageCodec
from kit.data.read.image_files import Image
from kit.model.sampling import Sampling, sampling_arguments


class Request(NamedTuple):
    """A prompt to complete."""

    ids: Sequence[int]  # of the prompt, at least one
    key: tuple[int, ...]  # seeds the sampling: differs for each completion of a run
    max_new_tokens: int
    images: Sequence[tuple[Image, str, str]] = ()  # of the prompt, see ``Table.images_with_origin``
    owner: int = 0  # the rank that gets the completion


class Completion(NamedTuple):
    """The generated tokens."""

    ids: list[int]  # with the stop token
    ended: bool  # with a stop token; else truncated at ``max_new_tokens``
    logps: Sequence[float] = ()  # of a server: the log-probabilities with which it sampled the ids


def text_of(tokenizer: Any, ids: Sequence[int], ended: bool = True) -> str:
    """Return the text of an answer, without the special token that ended it. Others, as ``<think>``, are text."""
    ends = ended and ids and ids[-1] in special_ids(tokenizer)
    return str(tokenizer.decode(ids[:-1] if ends else ids))


@lru_cache(1)  # with the 6,000 added tokens of Gemma it takes 30 ms
def special_ids(tokenizer: Any) -> set[int | None]:
    """Return the tokens that may end an answer: EOS, and those that were added to the vocabulary."""
    return {tokenizer.eos_token_id, *tokenizer.added_tokens_decoder}


def generate_answers(
    generate: Any,
    requests: Sequence[Request],
    *,
    stops: Collection[int],
    pad_token_id: int,
    sampling: Sampling,
    seed: int,
    device: torch.device,
    image_codec: ImageCodec | None = None,
) -> list[Completion]:
    """Complete a batch of requests.

    Args:
        generate: of the model, as ``kit.strategy.weights.generating`` yields it.
        stops: ids that end an answer.
        sampling, seed: see ``sampling_arguments``.
        image_codec: None: no request has an image.
    """
    rows = [torch.tensor(request.ids, dtype=torch.long) for request in requests]
    input_ids = pad_sequence(rows, True, pad_token_id, "left")  # [B, T]
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
    length = input_ids.shape[1]
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if image_codec:
        inputs |= image_codec.generation_inputs(input_ids, [request.images for request in requests])
    output = generate(
        max_new_tokens=max(request.max_new_tokens for request in requests),
        use_cache=True,
        pad_token_id=pad_token_id,
        eos_token_id=sorted(stops) or None,
        **sampling_arguments(sampling, seed, [request.key for request in requests], length),
        **tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs),
    )
    return [
        _completion(ids[: request.max_new_tokens], stops)
        for request, ids in zip(requests, output[:, length:].tolist(), strict=True)
    ]


def _completion(ids: list[int], stops: Collection[int]) -> Completion:
    """A completion up to the first of ``stops``; padding follows."""
    end = next((i for i, token_id in enumerate(ids) if token_id in stops), None)
    return Completion(ids, ended=False) if end is None else Completion(ids[: end + 1], ended=True)
