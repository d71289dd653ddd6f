"""Any objective trains as exactly as the supervised loss: here one over pairs of rows, with two terms."""

from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from data_helpers import open_recipe_data
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.config.settings.objective import ObjectiveSettings
from kit.data.feed.batches import Collator
from kit.data.feed.feed import GlobalBatch
from kit.data.feed.ranks import Ranks
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.strategy.accelerator import Prepared
from kit.train.objective import OBJECTIVES, SupervisedLoss, build_objective
from kit.train.step import train_step

PAIRS = [(3, 14), (15, 9), (26, 5), (35, 8)]  # samples: the better one, the worse one


@dataclass(frozen=True)
class PairedMargin:
    """Two terms: how much the worse row of a pair comes within ``margin`` nats of the better one, and cross-entropy.

    The first is a mean over pairs: rows 2 k and 2 k + 1 of a micro-batch. The second is a mean over targets, weighted
    by the probability that the model gives to each of them before the step, from a pass without gradients.
    """

    margin: float
    num_pairs: int  # of the global batch

    def begin_step(self, prepared, batch):
        micro_batches = []
        with torch.no_grad():
            for micro_batch in batch.micro_batches:
                weights = (-prepared.model(**micro_batch.model_inputs())).exp()
                micro_batches.append(replace(micro_batch, weights=weights))
        total = sum(micro_batch.weights.sum().item() for micro_batch in micro_batches)
        return replace(batch, micro_batches=micro_batches, target_weights=np.array([total]))

    def divisors(self, batch):
        return [self.num_pairs, batch.target_weights.sum()]

    def terms(self, losses, micro_batch):
        num_rows, length = micro_batch.input_ids.shape
        rows = micro_batch.target_positions // length  # [S]
        by_row = torch.zeros(num_rows).index_add(0, rows, losses)  # nats of each row
        better, worse = by_row[0::2], by_row[1::2]
        shortfall = torch.relu(self.margin + better - worse).sum()
        weighted = (losses * micro_batch.weights).sum()
        num_right = (better < worse).sum()
        return [shortfall, weighted], torch.stack([shortfall, weighted, num_right]).detach().double()

    def metrics(self, sums, batch):
        of_pairs, of_targets = self.divisors(batch)
        return {"loss": sums[0] / of_pairs + sums[1] / of_targets, "accuracy": sums[2] / self.num_pairs}


@pytest.fixture(scope="module")
def train(model_folder, chat_file):
    """Trains ``num_steps`` steps on ``PAIRS``, ``pairs_each`` in a micro-batch. Returns the results and the weights."""
    recipe = Recipe(model_name_or_path=str(model_folder), dataset=str(chat_file), max_length=256, method="full")
    samples = open_recipe_data(recipe, open_tokenizer(recipe), 320).train

    def train(pairs_each, num_steps=1):
        torch.set_num_threads(1)
        model = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        collator = Collator(2 * pairs_each, 0, packing=False)
        items = [np.array([i]) for pair in PAIRS for i in pair]
        rows = [items[start : start + 2 * pairs_each] for start in range(0, len(items), 2 * pairs_each)]
        counts = np.ones(1, np.int64)
        batch = GlobalBatch(
            [collator.collate(samples, each) for each in rows], np.ones(1), counts, counts, epoch=1.0, origins=[]
        )
        prepared = Prepared(Accelerator(cpu=True), Ranks(), model, optimizer, actual_strategy(sharded_layers=None))
        objective = PairedMargin(margin=200.0, num_pairs=len(PAIRS))
        results = [train_step(prepared, objective, batch, 1e-3, max_grad_norm=0) for _ in range(num_steps)]
        return results, torch.cat([p.detach().flatten() for p in model.parameters()])

    return train


@pytest.mark.slow
def test_a_second_objective_has_one_gradient_however_its_pairs_are_cut_up(train):
    (whole,), weights = train(pairs_each=4)
    for pairs_each in (1, 2, 3):
        (cut,), cut_weights = train(pairs_each)
        assert cut.loss == pytest.approx(whole.loss, rel=1e-6) and cut.metrics == whole.metrics
        assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=5e-6)
        assert torch.allclose(cut_weights, weights, rtol=1e-4, atol=1e-7)


def test_each_objective_that_can_be_chosen_is_registered_and_no_other():
    assert list(get_args(ObjectiveSettings.model_fields["objective"].annotation)) == list(OBJECTIVES)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_built_by_its_name(name):
    assert type(build_objective(ObjectiveSettings(objective=name), ["a"])) is OBJECTIVES[name]


def test_an_objective_made_of_the_supervised_one_may_sum_more_numbers():
    batch = GlobalBatch([], np.array([2.0]), np.ones(1, np.int64), np.ones(1, np.int64), epoch=1.0, origins=[])
    assert SupervisedLoss(["a"]).metrics([3.0, 99.0], batch) == {"loss": 1.5}


@pytest.mark.slow
def test_a_second_objective_is_learned_and_reports_what_it_measures(train):
    results, _ = train(pairs_each=2, num_steps=30)
    assert results[-1].loss < 0.8 * results[0].loss
    assert results[-1].metrics["accuracy"] >= results[0].metrics["accuracy"]
