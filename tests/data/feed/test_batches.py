"""Samples as tensors: every target at its place, alone in a row or in a pack, whichever rank computes it."""

import numpy as np
import pytest
import torch
from data_helpers import ROWS, open_all, write

from kit.data.feed.batches import Collator, evaluation_batches, padded_length
from kit.data.feed.data_ranks import Ranks
from kit.data.kinds.unpaired_preference import LABEL

PAD = 7


@pytest.fixture
def many(folder, tokenizer):
    def make(num, objective="sft"):
        write(folder / "train.jsonl", *ROWS[objective](num))
        return open_all(tokenizer, objective=objective).train

    return make


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("objective", ROWS)
def test_each_sequence_is_whole_in_its_row_and_its_targets_are_the_tokens_after_their_positions(
    objective, packing, many
):
    train = many(6, objective)
    items = [[5, 1], [0, 3]] if packing else [[5], [1], [0]]
    num = train.sequence_lengths.shape[1]
    references = -np.arange(6.0 * num).reshape(6, num)
    train.attach("references", references, per="sequence")
    batch = Collator(3, PAD, packing, max_length=512).collate(train, [np.array(item) for item in items])
    rows = [[(i, k, *each) for i in item for k, each in enumerate(train.sequences(i))] for item in items]
    rows = rows if packing else [[each] for row in rows for each in row]  # both sequences of a pair have a row
    length = batch.input_ids.shape[1]
    longest = max(sum(len(ids) for _, _, ids, _ in row) for row in rows)
    assert batch.input_ids.shape == (len(rows), longest if packing else padded_length(longest, 512))
    mask = batch.token_mask if packing else batch.attention_mask
    expected, sequences, segments = [], [], []
    for b, row in enumerate(rows):
        ids = [id_ for _, _, ids, _ in row for id_ in ids.tolist()]
        assert batch.input_ids[b].tolist() == ids + [PAD] * (length - len(ids))
        assert mask[b].tolist() == [1] * len(ids) + [0] * (length - len(ids))
        start = b * length
        for i, k, ids, weights in row:
            # Nothing predicts the first token of a sequence.
            at = [t for t in range(len(ids) - 1) if weights[t + 1]]
            expected += [(start + t, int(ids[t + 1]), float(weights[t + 1]), len(sequences)) for t in at]
            sequences.append((i, k))
            segments.append((start, len(ids), i))
            start += len(ids)
    found = [batch.target_positions.tolist(), batch.targets.tolist(), batch.weights.tolist()]
    assert list(zip(*found, batch.sequence_ids.tolist(), strict=True)) == expected and set(
        batch.dataset_ids.tolist()
    ) == {0}
    assert list(batch.segments) == segments
    assert batch.num_tokens == mask.sum() and batch.squared_lengths == sum(size**2 for _, size, _ in segments)
    assert batch.per_sequence["references"].tolist() == [float(references[place]) for place in sequences]
    if objective == "kto":
        assert batch.per_sequence["labels"].tolist() == [bool(train.values[i, LABEL]) for i, _ in sequences]
    if packing:
        assert "attention_mask" not in batch.model_inputs() and batch.cu_seq_lens.dtype == torch.int32
        sizes = list(batch.segment_lengths)  # of sequences, and of what is padding
        assert np.diff(batch.cu_seq_lens.tolist()).tolist() == sizes and sum(sizes) == batch.input_ids.numel()
        assert batch.position_ids.flatten().tolist() == [t for size in sizes for t in range(size)]
        starts = dict(zip(batch.cu_seq_lens.tolist(), sizes, strict=False))
        assert all(starts[start] == size for start, size, _ in segments) and batch.max_seq_len == max(sizes)


def test_rows_have_at_most_16_lengths_per_octave_and_a_sixteenth_of_padding():
    padded = [padded_length(longest, 9000) for longest in range(1, 9000)]
    for start in (128, 512, 4096):
        assert len(set(padded[start : 2 * start])) <= 16
    for longest, length in enumerate(padded, start=1):
        assert longest <= length < max(longest * 17 / 16, longest + 8) + 8
        assert length % 8 == 0 and length % 128 != 64
    assert padded == sorted(padded) and sum(padded) < 1.04 * sum(range(1, 9000))


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_without_samples_has_a_token_to_attend_to_and_no_target(many, packing):
    batch = Collator(1, PAD, packing=packing, max_length=512).collate(many(1), [])
    assert set(batch.input_ids.flatten().tolist()) == {PAD} and batch.num_tokens == 0
    assert packing or batch.attention_mask[0, 0] == 1
    assert not packing or batch.cu_seq_lens.tolist() == [0, 1]
    assert all(len(getattr(batch, name)) == 0 for name in ("targets", "target_positions", "weights", "dataset_ids"))


@pytest.mark.parametrize(("num_processes", "size"), [(1, 4), (3, 2)])
def test_evaluation_takes_each_sample_once_and_all_ranks_equally_many_batches(num_processes, size, many):
    train = many(13)
    ranks = [list(evaluation_batches(train, Ranks(rank, num_processes), size, 0)) for rank in range(num_processes)]
    assert len({len(batches) for batches in ranks}) == 1
    segments = [
        (batch.input_ids.flatten()[start : start + length].tolist(), i)
        for batches in ranks
        for batch in batches
        for start, length, i in batch.segments
    ]
    assert sorted(segments, key=lambda each: each[1]) == [(train[i][0].tolist(), i) for i in range(13)]
