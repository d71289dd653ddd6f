"""Samples as tensors: every target at its place, alone in a row or in a pack, whichever rank computes it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from data_helpers import byte_level_tokenizer, open_all, pairs, preference_pairs, rated_answers, write

from kit.data.feed.batches import Collator, evaluation_batches, padded_length
from kit.data.feed.ranks import Ranks


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    tokenizer = byte_level_tokenizer()

    def make(num, rows=pairs, **changes):
        folder = tmp_path_factory.mktemp("data")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KIT_CACHE", str(folder / "cache"))
            patch.chdir(folder)
            write(folder / "train.jsonl", *rows(num))
            return open_all(tokenizer, **changes).train

    return make


def rows_of(batch):
    """The unpadded rows of a padded batch that have targets."""
    rows = [ids[: int(mask.sum())].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    return rows if len(batch.targets) else []


def segments_of(batch):
    """The samples of a packed batch that have targets."""
    bounds, ids = batch.cu_seq_lens.tolist(), batch.input_ids.flatten()
    has_target = {int(np.searchsorted(bounds, p, side="right")) - 1 for p in batch.target_positions.tolist()}
    return [ids[bounds[i] : bounds[i + 1]].tolist() for i in sorted(has_target)]


def single(*ids):
    return [np.array([i]) for i in ids]


def test_targets_are_the_tokens_after_their_positions(many):
    train = many(6)
    batch = Collator(3, pad_token_id=7, packing=False, max_length=512).collate(train, single(5, 0, 3))
    num_rows, length = batch.input_ids.shape
    assert (num_rows, length) == (3, padded_length(int(max(train.lengths[[5, 0, 3]])), 512))
    expected = []
    for row, i in enumerate([5, 0, 3]):
        ids, weights = train[i]
        assert batch.input_ids[row].tolist() == ids.tolist() + [7] * (length - len(ids))
        assert batch.attention_mask[row].tolist() == [1] * len(ids) + [0] * (length - len(ids))
        expected += [(row * length + t, int(ids[t + 1])) for t in range(len(ids) - 1) if weights[t + 1]]
    assert list(zip(batch.target_positions.tolist(), batch.targets.tolist(), strict=True)) == expected
    assert batch.weights.tolist() == [1.0] * len(expected) and set(batch.dataset_ids.tolist()) == {0}
    assert batch.num_tokens == batch.attention_mask.sum()


LENGTHS = range(1, 9000)  # of longest rows


def test_rows_have_at_most_16_lengths_per_octave_and_a_sixteenth_of_padding():
    padded = [padded_length(longest, 9000) for longest in LENGTHS]
    for start in (128, 256, 512, 1024, 2048, 4096):
        assert len({padded_length(longest, 9000) for longest in range(start + 1, 2 * start + 1)}) <= 16
    for longest, length in zip(LENGTHS, padded, strict=True):
        assert longest <= length < max(longest * 17 / 16, longest + 8) + 8
        assert length % 8 == 0 and length % 128 != 64
    assert padded == sorted(padded)
    assert sum(padded) < 1.04 * sum(LENGTHS)


def test_a_pack_holds_its_samples_one_after_another_with_bounds_between_them(many):
    train = many(6)
    batch = Collator(2, pad_token_id=7, packing=True, max_length=512).collate(train, [np.array([5, 1]), np.array([0])])
    assert batch.attention_mask is None and "attention_mask" not in batch.model_inputs()
    length = batch.input_ids.shape[1]
    lengths = train.lengths.tolist()
    assert length == max(lengths[5] + lengths[1], lengths[0])
    row = batch.input_ids[0].tolist()
    assert row[: lengths[5]] == train[5][0].tolist() and row[lengths[5] :] == train[1][0].tolist()
    assert batch.position_ids[0].tolist() == [*range(lengths[5]), *range(lengths[1])]
    assert batch.position_ids[1].tolist() == [*range(lengths[0]), *range(length - lengths[0])]
    assert batch.token_mask.tolist() == [[1] * length, [1] * lengths[0] + [0] * (length - lengths[0])]
    bounds = [0, lengths[5], length, length + lengths[0], 2 * length]
    assert batch.cu_seq_lens.tolist() == bounds
    assert batch.cu_seq_lens.dtype == torch.int32 and batch.num_tokens == batch.token_mask.sum()
    assert batch.max_seq_len == max(b - a for a, b in pairwise(bounds))
    # nothing is predicted across the border of two samples
    expected = []
    for i, start in ((5, 0), (1, lengths[5]), (0, length)):
        ids, weights = train[i]
        expected += [(start + t, int(ids[t + 1])) for t in range(len(ids) - 1) if weights[t + 1]]
    assert list(zip(batch.target_positions.tolist(), batch.targets.tolist(), strict=True)) == expected


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_without_samples_has_a_token_to_attend_to_and_no_target(many, packing):
    batch = Collator(1, pad_token_id=7, packing=packing, max_length=512).collate(many(1), [])
    assert set(batch.input_ids.flatten().tolist()) == {7} and batch.num_tokens == 0
    assert packing or batch.attention_mask[0, 0] == 1
    assert not packing or batch.cu_seq_lens.tolist() == [0, 1]
    assert all(len(getattr(batch, name)) == 0 for name in ("targets", "target_positions", "weights", "dataset_ids"))


@pytest.mark.parametrize(("num_processes", "size"), [(1, 4), (3, 2)])
def test_evaluation_takes_each_sample_once_and_all_ranks_equally_many_batches(num_processes, size, many):
    train = many(13)
    ranks = [list(evaluation_batches(train, Ranks(rank, num_processes), size, 0)) for rank in range(num_processes)]
    assert len({len(batches) for batches in ranks}) == 1
    rows = [row for batches in ranks for batch in batches for row in rows_of(batch)]
    assert sorted(rows) == sorted(ids.tolist() for ids, _ in train)


def targets_by_sequence(batch):
    """The targets and weights of each sequence of a batch."""
    return [
        (batch.targets[batch.sequence_ids == k].tolist(), batch.weights[batch.sequence_ids == k].tolist())
        for k in range(len(batch.labels))
    ]


def learned(ids, weights):
    """The targets and weights of a sequence, as it is stored."""
    chosen = [t for t in range(1, len(ids)) if weights[t]]
    return ids[chosen].tolist(), weights[chosen].tolist()


@pytest.mark.parametrize("packing", [False, True])
def test_of_a_pair_the_chosen_sequence_comes_first_and_both_have_their_own_targets(packing, many):
    train = many(6, preference_pairs, objective="dpo")
    items = [np.array([5, 1]), np.array([0])] if packing else single(5, 1, 0)
    batch = Collator(len(items), pad_token_id=7, packing=packing, max_length=512).collate(train, items)
    sequences = [each for i in (5, 1, 0) for each in train.sequences(i)]
    assert targets_by_sequence(batch) == [learned(*each) for each in sequences]
    assert batch.labels.tolist() == [True] * 6 and batch.references is None
    assert batch.num_tokens == sum(len(ids) for ids, _ in sequences)
    assert batch.squared_lengths == sum(len(ids) ** 2 for ids, _ in sequences)
    if packing:
        lengths = [len(ids) for ids, _ in sequences]
        assert batch.input_ids.shape == (2, sum(lengths[:4]))
        assert np.diff(batch.cu_seq_lens.tolist()).tolist()[:6] == lengths  # no sequence sees another
        assert batch.position_ids[0].tolist() == [t for length in lengths[:4] for t in range(length)]
    else:
        assert rows_of(batch) == [ids.tolist() for ids, _ in sequences]
        assert batch.input_ids.shape[1] == padded_length(int(train.row_lengths[[5, 1, 0]].max()), 512)
    assert {"sequence_ids", "labels"} <= batch.tensors().keys()


@pytest.mark.parametrize("packing", [False, True])
def test_the_label_of_an_answer_and_what_the_reference_gives_it_go_with_it(packing, many):
    train = many(6, rated_answers, objective="kto")
    train.references = np.stack([-np.arange(6.0), np.full(6, np.nan)], axis=1)
    batch = Collator(3, pad_token_id=7, packing=packing, max_length=512).collate(train, single(3, 1, 5))
    assert batch.labels.tolist() == [row["label"] for row in (rated_answers(6)[i] for i in (3, 1, 5))]
    assert batch.references.tolist() == [-3.0, -1.0, -5.0] and batch.references.dtype == torch.float64
    assert targets_by_sequence(batch) == [learned(*train[i]) for i in (3, 1, 5)]
    pairs_of_answers = many(4, preference_pairs, objective="dpo")
    pairs_of_answers.references = -np.arange(8.0).reshape(4, 2)
    batch = Collator(2, pad_token_id=7, packing=packing, max_length=512).collate(pairs_of_answers, single(3, 1))
    assert batch.references.tolist() == [-6.0, -7.0, -2.0, -3.0]
