"""A model that was built on meta has the weights and buffers of rank 0, and its optimiser its parameters.

tests/promises/test_strategies.py does it with two ranks.
"""

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
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
    queue += [getattr(holder, name).clone() for holder, name in sending._tables(whole)]
    monkeypatch.setattr(sending, "rank_and_world", lambda: (1, 2))
    monkeypatch.setattr(
        sending,
        "from_main",
        lambda make: (sending._forms(tensors), {}, {n: s.dtype for n, s in sending._states(whole).items()}),
    )
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: tensor.copy_(queue.pop(0)))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_the_tables_of_4_bit_weights(alone_in_a_group, monkeypatch, rank):
    def quantised(device):
        layer = Linear4bit(64, 8, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        layer.weight = Params4bit(torch.randn(8, 64), quant_type="nf4", quant_storage=torch.float32, module=layer)
        packed = layer.to("cpu").weight.to(device)
        layer.weight = packed if rank == 0 else Params4bit(packed.data, quant_storage=torch.float32, bnb_quantized=True)
        layer.quant_state.to(device)
        layer.support_avx512bf16_for_cpu = False  # as kit.model.load does
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([layer])
        return model

    whole = quantised("cpu")
    expected = whole.layers[0](torch.ones(1, 64))
    own = whole
    if rank:
        as_rank_1(monkeypatch, whole)
        own = quantised("meta")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    optimizer.param_groups[0]["params"].clear()
    sharded_and_sent(own, Sender(own, optimizer), optimizer)
    assert torch.equal(own.layers[0](torch.ones(1, 64)), expected)


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
