"""A model that was built on meta has the weights and buffers of rank 0, and its optimiser its parameters.

tests/promises/test_strategies.py does it with two ranks.
"""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from kit.errors import TrainingError
from kit.strategy import sending
from kit.strategy.sending import Sender


@pytest.fixture
def with_buffers(model):
    model.register_buffer("stored", torch.tensor([1.0, 2.0]))
    model.register_buffer("derived", torch.tensor(3), persistent=False)
    return model


def as_rank_1(monkeypatch, whole):
    """This process is another rank than 0, and is sent the tensors of ``whole`` in their order."""
    tensors = dict(sending._tensors(whole))
    queue = [tensor.detach().clone() for tensor in tensors.values()]
    monkeypatch.setattr(sending, "rank_and_world", lambda: (1, 2))
    monkeypatch.setattr(sending, "from_main", lambda make: (sending._forms(tensors), {}))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: tensor.copy_(queue.pop(0)))


def sharded_and_sent(model, sender, optimizer):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    sender.send(model, optimizer, torch.device("cpu"), offload=False)
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in sending._tensors(model)}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_the_weights_of_rank_0(alone_in_a_group, with_buffers, monkeypatch, rank):
    model = with_buffers.to(torch.float64)  # another dtype than that in which a model is built
    expected = {name: tensor.detach().clone() for name, tensor in sending._tensors(model)}
    if rank:
        as_rank_1(monkeypatch, model)
        model = type(model)().to("meta")
        model.layers[0].requires_grad_(False)
        model.register_buffer("stored", torch.empty(2, device="meta"))
        model.register_buffer("derived", torch.empty((), device="meta", dtype=torch.int64), persistent=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    found = sharded_and_sent(model, Sender(model, optimizer), optimizer)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    trained = [p for p in model.parameters() if p.requires_grad]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in trained]


def test_another_model_on_rank_0_is_an_error(alone_in_a_group, with_buffers, model, monkeypatch):
    as_rank_1(monkeypatch, model.head)
    with pytest.raises(TrainingError, match="another model"):
        Sender(model, torch.optim.AdamW(model.parameters()))
