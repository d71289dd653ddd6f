"""Copies are compared by sums that are equal for equal bits only, with as many bytes on any number of ranks."""

import threading
from types import SimpleNamespace

import pytest
import torch

from kit.errors import TrainingError
from kit.train import replicas
from kit.train.replicas import checksums, compare_replicas


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


@pytest.fixture
def compare(monkeypatch):
    """Compare the copies of some ranks, which are threads. Returns the messages, and the numbers of integers sent."""

    def compare(copies):
        barrier, given = threading.Barrier(len(copies), timeout=10), {}
        messages, num_sent = {}, dict.fromkeys(range(len(copies)), 0)
        this = threading.local()

        def exchange(value):
            given[this.rank] = value
            barrier.wait()
            everything = [given[rank] for rank in range(len(copies))]
            barrier.wait()
            return everything

        def all_reduce(tensor, op):
            assert op == torch.distributed.ReduceOp.MIN
            num_sent[this.rank] += tensor.numel()
            tensor.copy_(torch.stack(exchange(tensor.clone())).amin(dim=0))

        def rank(number):
            this.rank = number
            accelerator = SimpleNamespace(device=torch.device("cpu"))
            try:
                compare_replicas(SimpleNamespace(accelerator=accelerator, model=copies[number]), 7)
            except TrainingError as error:
                messages[number] = str(error)

        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
        monkeypatch.setattr(
            replicas, "gather_object", lambda values: [each for part in exchange(values) for each in part]
        )
        monkeypatch.setattr(replicas, "replicated", lambda accelerator, model: model)
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(copies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return [messages.get(number, "equal") for number in range(len(copies))], set(num_sent.values())

    return compare


def copies(num_ranks, num=9):
    return [{f"w{i}": torch.nn.Parameter(torch.full((3,), float(i))) for i in range(num)} for _ in range(num_ranks)]


def test_copies_that_differ_are_named_with_their_ranks_on_all_ranks(compare):
    all_copies = copies(4)
    with torch.no_grad():
        all_copies[2]["w3"][1] = 5
    all_copies[1]["w5"].grad = torch.ones(3)
    drifted = "step 7: replicas have drifted apart: "
    assert compare(all_copies)[0] == [drifted + "w3 on rank 2; gradient of w5 on rank 1"] * 4
    with torch.no_grad():
        for copy in all_copies[3].values():
            copy += 1
    (message,) = set(compare(all_copies)[0])
    assert message.startswith(drifted + "w0 on rank 3; w1 on rank 3; ") and message.endswith(" and 5 more tensors")


def test_a_shard_is_compared_with_its_copies_only(compare, monkeypatch):
    all_copies = copies(4, num=2)
    shards = {parameter: (rank % 2, 2) for rank, copy in enumerate(all_copies) for parameter in copy.values()}
    monkeypatch.setattr(replicas, "own_shard", shards.get)
    with torch.no_grad():
        for rank in (1, 3):  # other shards hold other values
            all_copies[rank]["w0"] += 7
    assert compare(all_copies)[0] == ["equal"] * 4
    with torch.no_grad():
        all_copies[2]["w1"] += 1
        all_copies[3]["w0"] += 1
    drifted = "step 7: replicas have drifted apart: w0 (shard 1) on rank 3; w1 (shard 0) on rank 2"
    assert compare(all_copies)[0] == [drifted] * 4
