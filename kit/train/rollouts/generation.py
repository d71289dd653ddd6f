"""Answers of the model to prompts, in batches: those of evaluations and of rollouts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from kit.model.sampling import how_to_generate


class Completion(NamedTuple):
    """What the model wrote."""

    ids: list[int]  # with the token that ended it
    ended: bool  # with a stop token; else it was cut at ``max_new_tokens``
    logps: Sequence[float] = ()  # of a server: the log-probabilities with which it drew the ids


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
    prompts: Sequence[Sequence[int]],
    *,
    stops: Collection[int],
    pad_token_id: int,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int,
    numbers: Sequence[tuple[int, ...]],
    device: torch.device,
    more_inputs: Callable[[torch.Tensor], Mapping[str, Any]] = lambda input_ids: {},
) -> list[Completion]:
    """Answer a batch of prompts.

    Args:
        generate: of the model, as ``kit.strategy.weights.generating`` yields it.
        stops: ids that end an answer.
        temperature: None: greedily; see ``how_to_generate``, also for ``top_p``, ``seed`` and ``numbers``.
        more_inputs: returns what the model needs besides for the prompts, int64 [B, T], padded on the left.
    """
    rows = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    input_ids = pad_sequence(rows, True, pad_token_id, "left")  # [B, T]
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
    length = input_ids.shape[1]
    output = generate(
        input_ids=input_ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        use_cache=True,
        pad_token_id=pad_token_id,
        eos_token_id=sorted(stops) or None,
        **how_to_generate(temperature, top_p, seed, numbers, length),
        **tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), dict(more_inputs(input_ids))),
    )
    return [_completion(ids, stops) for ids in output[:, length:].tolist()]


def _completion(ids: list[int], stops: Collection[int]) -> Completion:
    """An answer up to the first of ``stops``, behind which there is padding."""
    end = next((i for i, token_id in enumerate(ids) if token_id in stops), None)
    return Completion(ids, ended=False) if end is None else Completion(ids[: end + 1], ended=True)
