"""Answers to other prompts: each prompt once, each answer once, the same on every topology and in every epoch."""

import numpy as np
import pytest
from data_helpers import open_all, rated_answers, recipe, write

from kit.data.feed.mismatched import Mismatched
from kit.data.feed.ranks import Ranks

BATCH = 4
pytestmark = pytest.mark.usefixtures("own_folder")


def opened(tokenizer, **changes):
    return open_all(tokenizer, **{"objective": "kto", "max_length": 128, "global_batch_size": BATCH, **changes})


def parts(samples, i):
    """The prompt and the answer of sample ``i``, as lists of ids."""
    ids, num = samples[i][0].tolist(), int(samples.preferences["prompt_length"][i])
    return ids[:num], ids[num:]


@pytest.mark.parametrize("num", [2, 3, 20])
def test_each_prompt_gets_the_answer_to_another_and_each_answer_is_used_once(num, tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *rated_answers(num))
    train = opened(tokenizer).train
    mismatched = Mismatched(train, seed=1, max_length=128)
    assert sorted(mismatched.partners.tolist()) == list(range(num))
    assert not (mismatched.partners == np.arange(num)).any()
    for i in range(num):
        ((ids, weights),) = mismatched.sequences(i)
        (prompt, _), (_, answer) = parts(train, i), parts(train, int(mismatched.partners[i]))
        assert ids.tolist() == prompt + answer and len(ids) == mismatched.lengths[i] == mismatched.row_lengths[i]
        assert weights.tolist() == [0] * len(prompt) + [1] * len(answer)


def targets(micro_batches):
    """The tokens and labels of the micro-batches of all ranks, in no order."""
    found = []
    for batch in micro_batches:
        for k in range(0 if batch.labels is None else len(batch.labels)):
            found.append((batch.targets[batch.sequence_ids == k].tolist(), bool(batch.labels[k])))
    return sorted(found)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (3, 1)])
def test_the_ranks_together_have_the_mismatched_answers_of_the_global_batch(
    num_ranks, size, packing, tmp_path, tokenizer
):
    write(tmp_path / "train.jsonl", *rated_answers(20))
    flags = {"packing": packing, "max_length": 128}

    def steps(num_ranks, size):
        settings = recipe(objective="kto", global_batch_size=BATCH, per_device_train_batch_size=size, **flags)
        feeds = [
            opened(tokenizer, **flags).open_feed(settings, Ranks(rank, num_ranks), 0, {}) for rank in range(num_ranks)
        ]
        return [[feed.take(step) for feed in feeds] for step in range(3)]

    train = opened(tokenizer, **flags).train
    partners = Mismatched(train, recipe().seed, 128).partners
    for alone, shares in zip(steps(1, BATCH), steps(num_ranks, size), strict=True):
        (whole,) = alone
        num = whole.num_samples
        assert num == BATCH if not packing else num > BATCH
        assert targets(batch for share in shares for batch in share.mismatched) == targets(whole.mismatched)
        assert len({len(share.mismatched) for share in shares}) == 1  # or collectives would not match
        assert sum(len(batch.labels) for batch in whole.mismatched) == num
        # Packed as the samples are: their pass then takes about as many rows.
        num_rows = sum(len(batch.input_ids) for batch in whole.mismatched)
        assert num_rows <= BATCH + 1 if packing else num_rows == num
        numbers = [int(origin.split(":")[1]) - 1 for origin in whole.origins]
        wanted = sorted(parts(train, int(partners[i]))[1] for i in numbers)
        assert sorted(ids for ids, _ in targets(whole.mismatched)) == wanted
