"""Batched generation, for evaluations and rollouts.

Equal prompts of a batch, as those of a group are, go through the model once. Rows that have ended leave the batch.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache, StoppingCriteria
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList

from kit.data.chat.tokens import MediaCodec
from kit.data.media import Media
from kit.data.samples.samples import Samples
from kit.model.sampling import Sampling, sampling_arguments

# An argument of ``generate``, renamed in transformers 5.24.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


ANY_ANSWER = "?"  # with which functions are tried where there is no reference answer


class Request(NamedTuple):
    """A prompt to complete."""

    ids: Sequence[int]  # of the prompt, at least one
    key: tuple[int, ...]  # seeds the sampling: differs for each completion of a run
    max_new_tokens: int
    media: Sequence[tuple[Media, str, str]] = ()  # of the prompt, see ``Table.media_with_origin``
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


def reference_of(tokenizer: Any, samples: Samples, i: int) -> str | None:
    """Return the text of the reference answer of sample ``i``; None if it is a prompt alone."""
    ids = samples.prompt(i).reference
    return text_of(tokenizer, ids) if ids else None


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
    media_codec: MediaCodec | None = None,
) -> list[Completion]:
    """Complete a batch of requests.

    Args:
        generate: of the model, as ``kit.strategy.weights.generating`` yields it.
        stops: ids that end an answer.
        sampling, seed: see ``sampling_arguments``.
        media_codec: None: no request has an image.
    """
    rows = [torch.tensor(request.ids, dtype=torch.long) for request in requests]
    input_ids = pad_sequence(rows, True, pad_token_id, "left")  # [B, T]
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
    length = input_ids.shape[1]
    media = media_codec.generation_inputs(input_ids, [request.media for request in requests]) if media_codec else {}
    input_ids, mask, media = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (input_ids, mask, media))
    options: dict[str, Any] = {"use_cache": True, "pad_token_id": pad_token_id, "return_dict_in_generate": True}
    # Under FSDP all ranks must make the same calls. A vision-language model remembers the positions of the rows.
    is_text = (config := generate.func.__self__.config).get_text_config() is config
    can_continue = is_text and "synced_gpus" not in generate.keywords and _can_choose_rows(generate, device, options)
    prompts = [tuple(request.ids) for request in requests]
    if can_continue and length > 1 and len({*prompts}) < len(prompts):
        options[CACHE] = _cache_of_prompts(generate, prompts, input_ids, mask, options)
    options |= media | {"eos_token_id": sorted(stops) or None}
    completions: list[Any] = [None] * len(requests)
    going = [*range(len(requests))]  # the row of ``input_ids`` [n, t] holds the request of that number
    while going:
        most = torch.tensor([length + requests[i].max_new_tokens for i in going], device=device)
        if can_continue:
            enough = _EnoughEnded(torch.tensor(sorted(stops), device=device), most)
            options["stopping_criteria"] = StoppingCriteriaList([enough])
        keys = [requests[i].key for i in going]
        output = generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=int(most.max()) - input_ids.shape[1],
            **sampling_arguments(sampling, seed, keys, length),
            **options,
        )
        for i, ids in zip(going, output.sequences[:, length:].tolist(), strict=True):
            completions[i] = _completion(ids[: requests[i].max_new_tokens], stops)
        if not can_continue:
            break
        are_done = [completions[i].ended or len(completions[i].ids) == requests[i].max_new_tokens for i in going]
        kept: Any = torch.tensor([not is_done for is_done in are_done], device=device).nonzero()[:, 0]
        going = [going[row] for row in kept.tolist()]
        input_ids = output.sequences[kept]
        mask = F.pad(mask[kept], (0, input_ids.shape[1] - mask.shape[1]), value=1)
        options[CACHE] = output[CACHE]
        options[CACHE].reorder_cache(kept)
    return completions


def _can_choose_rows(generate: Any, device: torch.device, options: dict[str, Any]) -> bool:
    """Whether rows of the model's cache can be chosen, which one token shows. The model remembers it."""
    model = generate.func.__self__
    if not hasattr(model, "can_choose_rows"):
        one = torch.ones((1, 1), dtype=torch.long, device=device)
        cache = generate(input_ids=one, attention_mask=one, max_new_tokens=1, do_sample=False, **options)[CACHE]
        kinds = {*map(type, getattr(cache, "layers", ()))}
        model.can_choose_rows = (
            type(cache) is DynamicCache
            and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
            and cache.get_seq_length() == 1
        )
    return bool(model.can_choose_rows)


def _cache_of_prompts(
    generate: Any, prompts: Sequence[Any], input_ids: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]
) -> Any:
    """Return keys and values of the prompts but for their last tokens, of equal prompts computed once."""
    equal = [prompts.index(prompt) for prompt in prompts]  # for each prompt the first one like it
    firsts = sorted({*equal})
    cache = generate(
        input_ids=input_ids[firsts, :-1],
        attention_mask=mask[firsts, :-1],
        max_new_tokens=1,  # which the cache does not hold
        do_sample=False,
        **options,
    )[CACHE]
    cache.reorder_cache(torch.tensor([*map(firsts.index, equal)], device=input_ids.device))
    return cache


class _EnoughEnded(StoppingCriteria):
    """Ends a call when a quarter of its rows have ended: leaving them out costs a copy of the cache."""

    def __init__(self, stops: torch.Tensor, most: torch.Tensor) -> None:
        """``most``: int64 [n], the length at which each row ends."""
        self._stops, self._most = stops, most
        self._ended = torch.zeros_like(most, dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Return bool [n], all alike."""
        self._ended |= torch.isin(input_ids[:, -1], self._stops) | (input_ids.shape[1] >= self._most)
        return (4 * self._ended.sum() >= len(self._ended)).expand(len(self._ended))  # type: ignore[return-value]


def _completion(ids: list[int], stops: Collection[int]) -> Completion:
    """A completion up to the first of ``stops``; padding follows."""
    end = next((i for i, token_id in enumerate(ids) if token_id in stops), None)
    return Completion(ids, ended=False) if end is None else Completion(ids[: end + 1], ended=True)
