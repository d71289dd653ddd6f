"""A chunk of logits has a size that depends on the vocabulary, and on the hidden size or a GPU's memory."""

from kit.model.chunks import CHUNK_BYTES, chunk_size


def test_a_chunk_takes_its_bytes_and_under_a_trained_head_an_eighth_of_the_hidden_size():
    assert chunk_size(128_256, 4096, head_trains=False) == CHUNK_BYTES // (4 * 128_256)
    assert chunk_size(128_256, 4096, head_trains=True) == 4096 // 8
    assert chunk_size(1000, 4096, head_trains=True) == CHUNK_BYTES // 4000
    assert chunk_size(2**40, 8, head_trains=False) == 1


def test_on_a_gpu_a_chunk_fills_tiles_and_takes_two_hundredths_of_the_memory():
    cases = [
        (128_256, False, 80, 1024),  # twice 525 MB
        (128_256, True, 80, 768),  # four times 394 MB; 1,024 would take 2.1 GB
        (128_256, True, 141, 1024),
        (128_256, False, 24, 512),  # never fewer than 261
        (32_000, False, 24, 1280),  # nor than 1,048
        (32_000, True, 8, 1280),
    ]
    for case in cases:
        vocab_size, head_trains, gib, expected = case
        assert chunk_size(vocab_size, 4096, head_trains, gib * 2**30) == expected, case
