"""Copies are compared by sums that are equal for equal bits only, with as many bytes on any number of ranks."""

from types import SimpleNamespace

import pytest
import torch

from kit.system.errors import TrainingError
from kit.train.checks import replicas
from kit.train.checks.replicas import checksums, compare_replicas


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


@pytest.mark.parametrize("rank", [0, 3])
def test_copies_that_differ_are_named_with_their_ranks_and_shards(monkeypatch, rank):
    """Ranks 0 and 1 hold the first half of a tensor, ranks 2 and 3 the second; all hold the other tensor whole."""
    values = [{"a.weight": torch.ones(4), "b.weight": torch.zeros(3)} for _ in range(4)]
    values[3]["a.weight"][1] = 2.0
    values[2]["b.weight"][0] = 1.0
    models = [{name: torch.nn.Parameter(tensor) for name, tensor in each.items()} for each in values]

    def sums(rank):
        shards = {"a.weight": (rank // 2, 2), "b.weight": (0, 1)}
        return {(name, shards[name]): checksums([tensor])[0] for name, tensor in values[rank].items()}

    def gather(sent):
        return [sums(rank) for rank in range(4)] if isinstance(sent[0], dict) else [*sent, ["b.weight on rank 2"]]

    monkeypatch.setattr(replicas, "replicated", lambda accelerator, model: model)
    monkeypatch.setattr(replicas, "gather_object", gather)
    of_a = models[rank]["a.weight"]
    monkeypatch.setattr(replicas, "own_shard", lambda each: (rank // 2, 2) if each is of_a else (0, 1))
    prepared = SimpleNamespace(accelerator=None, model=models[rank])
    compare_replicas(prepared, 0, 7), compare_replicas(prepared, 2, 7)  # not now
    with pytest.raises(TrainingError) as caught:
        compare_replicas(prepared, 1, 7)
    own = "a.weight (shard 1) on rank 3, " if rank == 3 else ""
    assert str(caught.value) == f"step 7: replicas have drifted apart: {own}b.weight on rank 2"
