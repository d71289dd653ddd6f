"""What the layers compile with does not depend on data."""

import torch

from kit.train.compilation import _example


def test_the_example_has_the_rows_of_a_micro_batch_and_an_odd_length(recipe):
    for rows in [1, 8]:
        for max_length in [256, 8192]:
            case = rows, max_length
            settings = {"per_device_train_batch_size": rows, "global_batch_size": 8, "max_length": max_length}
            ids = _example(recipe(**settings)).input_ids
            assert len(ids) == rows and ids.shape[1] % 2 == 1, case
            assert max_length == 256 or ids.numel() > 4096, case
            pairs = _example(recipe(**settings, objective="dpo", method="lora"))
            assert len(pairs.input_ids) == 2 * rows, case


def test_the_rows_of_a_packed_example_have_two_samples(recipe):
    batch = _example(recipe(packing=True, per_device_train_batch_size=2, global_batch_size=2))
    length = batch.input_ids.shape[1]
    assert len(batch.cu_seq_lens) == 5 and batch.cu_seq_lens[-1] == 2 * length
    assert batch.max_seq_len == batch.cu_seq_lens.diff().max() < length
    assert torch.equal(batch.position_ids[0], batch.position_ids[1])
