"""A chunk of logits has a size that depends on the vocabulary, and under a trained head on the hidden size."""

from kit.model.chunks import CHUNK_BYTES, chunk_size


def test_a_chunk_takes_its_bytes_and_under_a_trained_head_an_eighth_of_the_hidden_size():
    assert chunk_size(128_256, 4096, head_trains=False) == CHUNK_BYTES // (4 * 128_256)
    assert chunk_size(128_256, 4096, head_trains=True) == 4096 // 8
    assert chunk_size(1000, 4096, head_trains=True) == CHUNK_BYTES // 4000
    assert chunk_size(2**40, 8, head_trains=False) == 1
