"""Answers of a batch are those of each prompt alone, and nothing is computed twice or after an answer's end."""

from functools import partial

import pytest
import torch
from helpers import ROOT
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, MistralConfig

from kit.model.sampling import Sampling, sampling_arguments
from kit.rollouts.generation import Request, generate_answers

SMALL = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
STOPS = {3, 5, 8, 13}
PROMPTS = [[7, 9, 11], [20, 21, 22, 23, 24, 25, 26, 27, 28], [0, 7, 9, 11], [31]]  # the third begins with padding's id
REQUESTS = [Request(prompt, (2, i, k), 6 + 9 * (k % 3)) for i, prompt in enumerate(PROMPTS) for k in range(5)]


def answers(generate, requests):
    options = {"seed": 1, "device": torch.device("cpu"), "pad_token_id": 0}
    return generate_answers(generate, requests, stops=STOPS, sampling=Sampling(1.0), **options)


def alone(model, request):
    """The answer by transformers' own loop."""
    ids = torch.tensor([request.ids])
    draws = sampling_arguments(Sampling(1.0), 1, [request.key], ids.shape[1])
    known = {"pad_token_id": 0, "eos_token_id": sorted(STOPS), "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, max_new_tokens=request.max_new_tokens, **known, **draws)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "sliding window", "recurrent"])
def test_answers_are_those_of_each_prompt_alone(family):
    torch.manual_seed(0)
    config = {
        "llama": lambda: LlamaConfig(**SMALL, **HEADS),
        "sliding window": lambda: MistralConfig(**SMALL, **HEADS, sliding_window=5),
        "recurrent": lambda: MambaConfig(**SMALL, state_size=4),  # there is no cache whose rows could be chosen
    }[family]()
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.3) if "layers" in name and weight.ndim == 2 else None
    found = answers(partial(model.generate), REQUESTS)
    assert [each.ids for each in found] == [alone(model, request) for request in REQUESTS]
    assert len({each.ended for each in found}) == 2 and {len(each.ids) for each in found} >= {6, 15, 24}
    assert answers(partial(model.generate, synced_gpus=False), REQUESTS) == found  # as under FSDP


def test_a_prompt_of_a_group_is_computed_once_and_a_row_that_has_ended_no_more():
    model = AutoModelForCausalLM.from_pretrained(ROOT / "recipes/tiny/model").eval()
    shapes = []
    model.register_forward_pre_hook(lambda _, args, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    group = [Request(range(40, 80), (0, 0, k), 2 + 8 * k) for k in range(4)]  # at most 2, 10, 18 and 26 tokens
    lengths = [len(each.ids) for each in answers(partial(model.generate), group)]
    assert lengths == [2, 10, 18, 26]
    _, prompt, *steps = shapes  # the first shows what kind of cache the model has
    assert prompt == (1, 39) and all(length == 1 for _, length in steps)
    assert sum(rows for rows, _ in steps) == sum(lengths)
    shapes.clear()
    answers(partial(model.generate), [Request(range(40 + i, 80 + i), (0, i, 0), 4) for i in range(3)])
    assert shapes[0] == (3, 40) and len(shapes) <= 4  # different prompts have no pass of their own
