"""Replicas are compared by checksums, with the same traffic on any number of ranks."""

import torch

from kit.train.checks.replicas import checksums


def test_checksums_see_one_bit_and_one_exchange():
    for tensor in (torch.randn(3, 7), torch.randn(5).bfloat16(), torch.tensor(1.5), torch.arange(9, dtype=torch.uint8)):
        (plain,) = checksums([tensor])
        assert checksums([tensor.clone()]) == [plain]
        for i in range(tensor.numel()):
            other = tensor.clone().reshape(-1)
            other.view(torch.uint8)[i * tensor.element_size()] ^= 1
            assert checksums([other.reshape(tensor.shape)]) != [plain]
    one = torch.randn(1000)
    exchanged = one.clone()
    exchanged[[3, 900]] = one[[900, 3]]
    assert checksums([one, exchanged])[0] != checksums([one, exchanged])[1]
    assert checksums([]) == []
