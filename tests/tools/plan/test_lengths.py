"""The lengths of real data, as rows that a run computes."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT

from kit.config.recipe import Recipe
from kit.data.feed.order import Order
from kit.tools.plan.lengths import measure_lengths

MODEL = ROOT / "recipes/tiny/model"


def data(tokens, batch, capacity=None):
    sequences = np.array(tokens).reshape(len(tokens), -1)  # [N], or [N, 2] of pairs
    lengths = sequences.sum(axis=1)
    order = Order(lengths, np.zeros(len(lengths), np.int16), 0, batch, capacity=capacity)
    train = SimpleNamespace(
        lengths=lengths,
        sequence_lengths=sequences,
        row_lengths=sequences.max(axis=1),
        num_targets=lengths // 2,
        __len__=lambda: len(lengths),
    )
    return SimpleNamespace(train=train, order=order, total_steps=lambda recipe: order.total_steps(1))


def recipe(**changes):
    return Recipe(model_name_or_path=str(MODEL), dataset=str(ROOT / "recipes/tiny/train.jsonl"), **changes)


def test_padded_rows_are_as_long_as_the_longest_of_their_micro_batch():
    mine = recipe(global_batch_size=4, per_device_train_batch_size=2, max_length=100)
    found = measure_lengths(data([10, 20, 60, 100], 4), mine, 1)
    # 100 and 60, then 20 and 10, which are padded to 24
    assert found.row == found.seen == (100 + 24) / 2 and found.supervised == pytest.approx(95 / 248)
    assert (found.mean, found.longest, found.num_samples, found.num_steps, found.epochs) == (47.5, 100, 4, 1, 1)
    # Two ranks with one row each: 100 and 60, then 20, padded to 24, and 10; the slower one decides.
    apart = measure_lengths(data([10, 20, 60, 100], 4), mine.model_copy(update={"per_device_train_batch_size": 1}), 2)
    assert apart.row == (100 + 24) / 2 and apart.supervised == pytest.approx(95 / 248)


def test_packed_rows_are_almost_full_and_samples_attend_to_themselves():
    mine = recipe(global_batch_size=2, per_device_train_batch_size=1, max_length=100, packing=True)
    found = measure_lengths(data([50, 50, 70, 30], 2, capacity=100), mine, 1)
    assert found.row == 100 and found.supervised == 0.5
    assert found.seen == pytest.approx((2 * 50**2 + 70**2 + 30**2) / 200)
