"""The order of a run: a function of seed and step, whatever computes it, with every share as it was asked for."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from kit.data.feed.order import Order, permutation


def order(num=100, batch=8, seed=42, **options):
    lengths = np.random.default_rng(7).integers(5, 200, num)
    dataset_ids = options.pop("dataset_ids", np.zeros(num, np.int16))
    weights = options.pop("weights", None)
    return Order(lengths, dataset_ids, seed, batch, weights, **options), lengths


def ids(order, steps):
    return [[item.tolist() for item in order.batch(step)] for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 256])
@pytest.mark.parametrize("weights", [None, [3.0, 1.0]])
def test_a_batch_depends_only_on_the_seed_and_the_step(capacity, weights):
    options = {"dataset_ids": (np.arange(100) >= 90).astype(np.int16), "capacity": capacity, "weights": weights}
    straight = ids(order(**options)[0], range(30))
    assert ids(order(**options)[0], reversed(range(30))) == straight[::-1]
    assert ids(order(**options, seed=1)[0], range(30)) != straight


@pytest.mark.parametrize("capacity", [None, 256])
@pytest.mark.parametrize("batch", [7, 130])
def test_each_epoch_has_every_sample_once_and_the_next_begins_where_it_ends(capacity, batch):
    made, _ = order(batch=batch, capacity=capacity)
    num_steps = made.total_steps(3)
    items = [tuple(item) for step in range(num_steps) for item in made.batch(step)]
    size = made.num_items(0)
    assert len(items) == num_steps * batch and 0 <= len(items) - 3 * size < batch
    epochs = [items[i * size : (i + 1) * size] for i in range(3)]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("num_epochs", "steps"), [(1, 13), (1.1, 14), (0.5, 7), (2, 25), (0.01, 1)])
def test_epochs_are_rounded_up_to_whole_steps(num_epochs, steps):
    assert order()[0].total_steps(num_epochs) == steps


def test_weights_are_shares_of_the_samples_and_each_data_set_goes_through_all_its_samples():
    dataset_ids = np.repeat([0, 1, 2], [80, 15, 5]).astype(np.int16)
    made, _ = order(dataset_ids=dataset_ids, weights=[1.0, 1.0, 2.0], batch=10)
    assert made.quotas == [25, 25, 50]
    first_epoch = Counter(chain.from_iterable(chain.from_iterable(ids(made, range(10)))))
    assert [sum(first_epoch[i] for i in np.flatnonzero(dataset_ids == s)) for s in range(3)] == [25, 25, 50]
    assert set(first_epoch[i] for i in range(95, 100)) == {10}  # oversampled evenly
    assert set(first_epoch[i] for i in range(80, 95)) == {1, 2}
    # 80 samples in portions of 25: after 16 epochs each was seen five times
    all_epochs = Counter(chain.from_iterable(chain.from_iterable(ids(made, range(160)))))
    assert set(all_epochs[i] for i in range(80)) == {5}


def test_epochs_of_different_numbers_of_packs_follow_each_other_without_a_gap():
    dataset_ids = (np.arange(100) >= 30).astype(np.int16)
    made, _ = order(dataset_ids=dataset_ids, capacity=300, weights=[5.0, 1.0], batch=3)
    sizes = [made.num_items(epoch) for epoch in range(6)]
    assert len(set(sizes)) > 1
    seen = np.concatenate([item for step in range(made.total_steps(6)) for item in made.batch(step)]).tolist()
    epochs = [made.epoch(number).members.tolist() for number in range(6)]
    assert seen[: sum(map(len, epochs))] == list(chain.from_iterable(epochs))
    assert made.epochs_after(0) == 0 and 1 <= made.epochs_after(-(-sizes[0] // 3)) < 1.2


def test_an_order_is_the_same_in_every_version_of_the_kit():
    """Else a run that was stopped would go on with other samples."""
    assert permutation(8, 42, 0).tolist() == [7, 1, 6, 4, 3, 5, 0, 2]
    assert [item[0] for item in order(num=20, batch=8)[0].batch(1)] == [15, 5, 13, 18, 19, 14, 9, 0]


def test_without_shuffling_every_epoch_has_the_order_of_the_data():
    made, _ = order(num=20, batch=8, shuffle=False)
    seen = [int(item[0]) for step in range(5) for item in made.batch(step)]
    assert seen == [*range(20), *range(20)]
