"""Weights have their plain names and whole values under every wrapper."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kit.strategy import weights
from kit.strategy.weights import (
    clip_grad_norm,
    gather_trainable,
    generating,
    keeps_gradients,
    own_shards,
    plain_name,
    replicated,
    trainable_only,
)

TRAINABLE = ["layers.1.inner.weight", "layers.1.inner.bias", "head.weight", "head.bias"]


@pytest.fixture
def accelerator(accelerate_starts_afresh):
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.weight",
        "module.layers.0.weight",
        "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight",
    ],
)
def test_a_name_is_the_models_own_whatever_wraps_it(name):
    assert plain_name(name) == "layers.0.weight"


def test_what_is_frozen_is_left_out(model):
    assert list(trainable_only(model, {**model.state_dict(), "quantisation.map": torch.ones(1)})) == TRAINABLE


def test_the_norm_is_that_before_clipping_and_zero_only_measures(accelerator, model):
    for max_norm, after in ((0.0, 10.0), (2.0, 2.0), (100.0, 10.0)):
        gradients = [torch.zeros_like(p) for p in model.head.parameters()]
        gradients[0][0, :2] = torch.tensor([6.0, 8.0])
        for p, gradient in zip(model.head.parameters(), gradients, strict=True):
            p.grad = gradient
        assert clip_grad_norm(accelerator, model, max_norm).item() == pytest.approx(10.0)
        assert model.head.weight.grad.norm().item() == pytest.approx(after)


def test_the_main_process_has_whole_tensors_of_what_trains(accelerator, model, monkeypatch):
    whole = gather_trainable(accelerator, model)
    assert sorted(whole) == sorted(model.state_dict())  # a full model is saved with its frozen parts
    monkeypatch.setattr(model, "peft_config", {}, raising=False)
    state = gather_trainable(accelerator, model)
    assert sorted(state) == sorted(TRAINABLE)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    monkeypatch.setattr(type(accelerator), "is_main_process", property(lambda self: False))
    assert gather_trainable(accelerator, model) == {}


def test_a_model_in_one_process_has_no_copies_and_no_shards(accelerator, model):
    assert replicated(accelerator, model) == {}
    assert own_shards(model) is None and not keeps_gradients(model)


def test_copies_on_every_process_have_their_plain_names(alone_in_a_group, model, monkeypatch):
    wrapped = DistributedDataParallel(model)
    monkeypatch.setattr(weights, "strategy_of", lambda accelerator: "ddp")
    assert list(replicated(None, wrapped)) == list(dict(model.named_parameters()))
    assert own_shards(wrapped) is None and keeps_gradients(wrapped)


def test_after_a_pass_that_ended_midway_only_the_own_part_is_held(alone_in_a_group, model):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    model.unshard()
    assert not hasattr(model.head.weight, "placements")  # whole
    shards = own_shards(model)
    assert len(shards) == 6 and all(hasattr(shard, "placements") for shard in shards)


def test_in_one_process_generate_is_the_models_own(accelerator, model):
    model.generate = lambda *words: words
    with generating(accelerator, model) as generate:
        assert generate(1, 2) == (1, 2)
