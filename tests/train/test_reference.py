"""The log-probabilities of the reference are those of the model as it was at the start, however they are computed."""

import json
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from data_helpers import open_recipe_data
from helpers import WORDS, actual_strategy

from kit.config.recipe import Recipe
from kit.data.feed.batches import Collator
from kit.data.feed.ranks import Ranks
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.strategy.accelerator import Prepared
from kit.train.reference import sequence_logps, with_references, without_gradients

NUM = 6


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("pairs") / "pairs.jsonl", random.Random(0)
    with path.open("w") as file:
        for _ in range(NUM):
            texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 20))) for _ in range(3)]
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))) + "\n")
    return path


@pytest.fixture
def open_run(model_folder, pairs_file):
    """A function of settings: the recipe, its data, and the prepared model, whose weights have moved."""

    def open_run(moved=True, **changes):
        torch.set_num_threads(1)
        plain = {"model_name_or_path": str(model_folder), "dataset": str(pairs_file), "objective": "dpo"}
        recipe = Recipe(**plain | {"max_length": 128, "global_batch_size": NUM} | changes)
        data = open_recipe_data(recipe, open_tokenizer(recipe), 321)
        plan = LoadPlan(compute_dtype="float32", device="cpu")
        model = build_model(recipe, open_config(recipe), plan, packing=recipe.packing)
        prepared = Prepared(Accelerator(cpu=True), Ranks(), model, None, actual_strategy(sharded_layers=None))
        if moved:
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.1 * torch.randn_like(parameter))
        return recipe, data, prepared

    return open_run


def collate(data, packing=False):
    """All pairs in two micro-batches."""
    collator = Collator(NUM, 0, packing, 512)
    halves = np.split(np.arange(NUM), 2)
    items = [list(half[None]) if packing else list(half[:, None]) for half in halves]
    return [collator.collate(data.train, each) for each in items]


def logps(prepared, micro_batches):
    with without_gradients(prepared):
        return torch.cat([sequence_logps(prepared.model(**each.model_inputs()), each) for each in micro_batches])


def known(micro_batches):
    return torch.cat([each.references for each in micro_batches])


CASES = [
    {"lora_dropout": 0.5},
    {"use_dora": True},
    {"lora_modules_to_save": "embed_tokens,lm_head"},
    {"trainable_tokens": ["<|im_end|>"]},
    {"method": "qlora"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_of_an_adapter_is_its_base(open_run, case):
    """Also while the adapters train, and with dropout. The model is left as it was."""
    _, data, prepared = open_run(**case)
    # Nobody else has the base's 4-bit weights; what new adapters add is zero.
    _, _, unmoved = open_run(moved=False, **(case if "method" in case else {"method": "full"}))
    micro_batches = collate(data)
    before = logps(prepared, micro_batches)
    trained = {name: p.requires_grad for name, p in prepared.model.named_parameters()}
    found = with_references(prepared, micro_batches)
    assert torch.equal(known(found), logps(unmoved, micro_batches))
    assert prepared.model.training and torch.is_grad_enabled()
    assert {name: p.requires_grad for name, p in prepared.model.named_parameters()} == trained
    assert torch.equal(logps(prepared, micro_batches), before) and not torch.equal(before, known(found))
