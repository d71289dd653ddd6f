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
from kit.data.feed.batches import Collator, MicroBatch
from kit.data.feed.ranks import Ranks
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.strategy.accelerator import Prepared
from kit.train.precompute import add_references
from kit.train.reference import sequence_logps, sequence_weights, with_references, without_gradients

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


@pytest.mark.parametrize("packing", [False, True])
def test_references_computed_before_are_those_along_the_way(open_run, packing):
    """Samples are batched and packed in other ways then."""
    recipe, data, prepared = open_run(packing=packing, precompute_reference=True, moved=False)
    along = known(with_references(prepared, collate(data, packing)))
    add_references(prepared, recipe, data, 1, 0, lambda batches, *_: batches)
    before = known(collate(data, packing))
    assert torch.allclose(before, along, rtol=1e-6, atol=0)


def test_a_model_whose_weights_change_has_no_reference_in_it(open_run):
    _, data, prepared = open_run(method="full")
    with pytest.raises(AssertionError, match="no reference"):
        with_references(prepared, collate(data))


def micro_batch_of(sequence_ids, weights, num_sequences):
    blank = torch.zeros(len(weights), dtype=torch.int64)
    return MicroBatch(
        input_ids=blank[None],
        target_positions=blank,
        targets=blank,
        dataset_ids=blank,
        weights=torch.tensor(weights),
        sequence_ids=torch.tensor(sequence_ids, dtype=torch.int64),
        labels=torch.ones(num_sequences, dtype=torch.bool),
    )


def test_log_probabilities_are_sums_of_weighted_losses_by_sequence():
    micro_batch = micro_batch_of([0, 0, 2, 2, 2], [1.0, 0.5, 1.0, 1.0, 2.0], 3)
    losses = torch.tensor([1.0, 4.0, 2.0, 3.0, 0.5], requires_grad=True)
    found = sequence_logps(losses, micro_batch)
    assert found.dtype == torch.float64 and found.tolist() == [-3.0, 0.0, -6.0]
    assert sequence_weights(micro_batch).tolist() == [1.5, 0.0, 4.0]
    (found @ torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)).backward()
    assert losses.grad.tolist() == [-1.0, -0.5, -100.0, -100.0, -200.0]


def test_without_sequences_there_is_still_a_graph():
    """On a rank without pairs; else its backward pass would not take part."""
    losses = torch.zeros(0, requires_grad=True)
    found = sequence_logps(losses, micro_batch_of([], [], 0))
    assert found.shape == (0,) and found.requires_grad
    found.sum().backward()
    assert losses.grad.shape == (0,)
