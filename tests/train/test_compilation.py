"""What the layers compile with does not depend on data."""

import torch

from kit.train.compilation import _example


def test_the_example_has_the_rows_of_a_micro_batch_and_an_odd_length():
    for rows in [1, 8]:
        for max_length in [256, 8192]:
            ids = _example(max_length, rows, packing=False).input_ids
            assert len(ids) == rows and ids.shape[1] % 2 == 1, (rows, max_length)
            assert max_length == 256 or ids.numel() > 4096, (rows, max_length)


def test_the_rows_of_a_packed_example_have_two_samples():
    batch = _example(2048, 2, packing=True)
    length = batch.input_ids.shape[1]
    assert len(batch.cu_seq_lens) == 5 and batch.cu_seq_lens[-1] == 2 * length
    assert batch.max_seq_len == batch.cu_seq_lens.diff().max() < length
    assert torch.equal(batch.position_ids[0], batch.position_ids[1])
