"""The feed of a run: every topology is given the same global batches, and a step finds its batch made ahead."""

import threading
from itertools import chain

import numpy as np
import pytest
from data_helpers import ROWS, open_all, recipe, write

from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import Ahead

BATCH = 8


def feeds(tokenizer, num_ranks, micro_batch_size, **changes):
    """The feed of each rank."""
    flags = {"global_batch_size": BATCH, "per_device_train_batch_size": micro_batch_size, "max_length": 64, **changes}
    opened, settings = open_all(tokenizer, **flags), recipe(**flags)
    return [opened.open_feed(settings, Ranks(rank, num_ranks), 0, {}) for rank in range(num_ranks)]


def targets(batches):
    """Every supervised token of the micro-batches with its weight and its source, in no order."""
    columns = [(batch.targets.tolist(), batch.weights.tolist(), batch.dataset_ids.tolist()) for batch in batches]
    return sorted(target for each in columns for target in zip(*each, strict=True))


def test_the_counts_of_a_step_are_of_its_samples_by_data_set(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", {"prompt": "a ", "completion": "b"})
    write(tmp_path / "b.jsonl", {"text": "Hello there"})
    [feed] = feeds(tokenizer, 1, 2, dataset="a.jsonl,b.jsonl", global_batch_size=2)
    batch = feed.take(0)
    asked, answered, text = (len(tokenizer(words).input_ids) for words in ("a ", "b", "Hello there"))
    assert sorted(batch.origins) == ["a.jsonl:1", "b.jsonl:1"]
    assert batch.num_tokens.tolist() == [asked + answered + 1, text + 1]  # and an EOS each
    assert batch.num_targets.tolist() == [answered + 1, text]  # nothing predicts the first token of a text
    assert batch.target_weights.tolist() == [answered + 1, text]
    assert batch.epoch == 1.0


def test_what_the_next_step_needs_is_made_while_a_step_runs():
    made = {step: threading.Event() for step in range(3)}
    ahead = Ahead(lambda step: made[step].set() or step * 10, num_steps=2)
    assert ahead.take(0) == 0
    assert made[1].wait(5)
    assert ahead.take(1) == 10
    assert not made[2].wait(0.05)  # there are two steps


@pytest.mark.parametrize("objective", ROWS)
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(2, 2), (3, 1)])
def test_the_ranks_together_have_the_global_batch(num_ranks, micro_batch_size, packing, objective, tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *ROWS[objective](20))
    write(tmp_path / "b.jsonl", *ROWS[objective](25)[20:])
    changes = {"dataset": "a.jsonl,b.jsonl", "packing": packing, "objective": objective}
    [alone] = feeds(tokenizer, 1, BATCH, **changes)
    ranks = feeds(tokenizer, num_ranks, micro_batch_size, **changes)
    for step in range(3):
        whole, shares = alone.take(step), [feed.take(step) for feed in ranks]
        for kind in ("micro_batches", "mismatched"):  # answers to other prompts, for kto
            dealt = [getattr(share, kind) for share in shares]
            assert targets(chain(*dealt)) == targets(getattr(whole, kind))
            assert len(set(map(len, dealt))) == 1  # or collectives would not match
        for name in ("origins", "epoch", "num_samples", "chosen_weight", "target_weights", "num_tokens"):
            assert all(np.array_equal(getattr(share, name), getattr(whole, name)) for share in shares), name
        assert whole.num_samples >= BATCH if packing else whole.num_samples == BATCH
        if objective == "kto":
            assert sum(len(batch.segments) for batch in whole.mismatched) == whole.num_samples
        if objective == "dpo":  # both halves of a pair are on the same rank
            assert all(len(batch.segments) % 2 == 0 for share in shares for batch in share.micro_batches)
            chosen = sum(float(b.weights[b.sequence_ids % 2 == 0].sum()) for b in whole.micro_batches)
            assert whole.chosen_weight == chosen < whole.target_weights.sum()
