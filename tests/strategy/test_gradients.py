"""Gradient accumulation: gradients and their norm are those of all micro-batches of a step, and of no other pass."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.simulation.gradients import all_gradients
from kit.strategy.gradients import (
    accumulating,
    clear_gradients,
    clip_grad_norm,
    drop_gradients,
    take_gradients_as_computed,
)


def test_the_norm_is_that_before_clipping_and_zero_only_measures(model):
    for max_norm, after in ((0.0, 10.0), (2.0, 2.0), (100.0, 10.0)):
        gradients = [torch.zeros_like(p) for p in model.head.parameters()]
        gradients[0][0, :2] = torch.tensor([6.0, 8.0])
        for p, gradient in zip(model.head.parameters(), gradients, strict=True):
            p.grad = gradient
        assert clip_grad_norm(model, list(model.parameters()), max_norm).item() == pytest.approx(10.0)
        assert model.head.weight.grad.norm().item() == pytest.approx(after)


@pytest.mark.parametrize(("flags", "is_reduced"), [({}, True), ({"sync_each_batch": False}, False)])
def test_gradients_of_a_sharded_model_are_not_kept_whole_unless_asked_for(sharded, flags, is_reduced):
    prepared = sharded(**flags)
    with accumulating(prepared.accelerator, prepared.model, is_last=False):
        prepared.accelerator.backward(prepared.model(torch.ones(3, 4)).sum())
    gradients = [p.grad for p in prepared.model.parameters() if p.requires_grad]
    assert all((gradient is not None) == is_reduced for gradient in gradients)
    with accumulating(prepared.accelerator, prepared.model, is_last=True):
        prepared.accelerator.backward(prepared.model(torch.ones(3, 4)).sum())
    bias = prepared.model.head.bias.grad.full_tensor()
    assert bias.tolist() == [6.0, 6.0]  # of both micro-batches


@pytest.mark.parametrize(("drops", "expected"), [(False, 6.0), (True, 3.0)])
def test_copies_of_a_sharded_model_add_up_after_the_last_micro_batch(alone_in_a_group, model, drops, expected):
    mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    accelerator = SimpleNamespace(gradient_state=SimpleNamespace(plugin_kwargs={"sync_each_batch": True}))
    with accumulating(accelerator, model, is_last=False):
        model(torch.ones(3, 4)).sum().backward()
    assert model.head.bias.grad is None and all_gradients(model)  # reduced inside this copy only
    if drops:
        drop_gradients(model)
        assert all_gradients(model) == []
    with accumulating(accelerator, model, is_last=True):
        model(torch.ones(3, 4)).sum().backward()
    assert model.head.bias.grad.full_tensor().tolist() == [expected, expected]


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_sharded_gradients_are_clipped_with_every_bit_of_torchs_own_way(alone_in_a_group, model, shape, max_norm):
    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names))
    model(torch.arange(12.0).reshape(3, 4)).square().sum().backward()
    weights = trained(model)
    before = [p.grad.clone() for p in weights]
    norm = clip_grad_norm(model, weights, max_norm)
    clipped = [p.grad for p in weights]
    for p, gradient in zip(weights, before, strict=True):
        p.grad = gradient
    assert norm.item() == torch.nn.utils.clip_grad_norm_(weights, max_norm).full_tensor().item() > 0.5
    assert all(torch.equal(own.to_local(), p.grad.to_local()) for own, p in zip(clipped, weights, strict=True))


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def in_bf16(model):
    return model.to(torch.bfloat16)


def add_up(accelerator, model, sizes):
    """The gradient of the head's bias after micro-batches of these sizes, each of which adds its size."""
    take_gradients_as_computed(model)
    for i, size in enumerate(sizes, start=1):
        with accumulating(accelerator, model, is_last=i == len(sizes)):
            model(torch.ones(size, 4, dtype=torch.bfloat16)).sum().backward()
    return next(p.grad for name, p in model.named_parameters() if name.endswith("head.bias"))


def test_micro_batches_of_weights_in_bf16_are_added_up_in_float32(accelerator, model):
    """In bf16, 1 added to 256 is 256."""
    gradient = add_up(accelerator, in_bf16(model), [256, 1, 1, 1])
    assert gradient.dtype == torch.float32 and gradient.tolist() == [259.0, 259.0]
    clear_gradients(accelerator, trained(model))
    gradient = add_up(accelerator, model, [3])
    assert gradient.dtype == torch.bfloat16 and gradient.tolist() == [3.0, 3.0]  # of one there is nothing to add up


def test_a_micro_batch_of_float32_weights_takes_no_walk_over_the_model(accelerator, model, monkeypatch):
    """Over one with a frozen vision tower the host would walk for longer than a GPU needs for a layer."""
    take_gradients_as_computed(model)
    monkeypatch.setattr(model, "parameters", None)
    with accumulating(accelerator, model, is_last=True):
        pass


def test_so_are_those_of_shards_in_bf16(alone_in_a_group, model):
    fully_shard(in_bf16(model), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    accelerator = SimpleNamespace(gradient_state=SimpleNamespace(plugin_kwargs={"sync_each_batch": True}))
    gradient = add_up(accelerator, model, [256, 1, 1, 1])
    assert gradient.dtype == torch.float32 and gradient.full_tensor().tolist() == [259.0, 259.0]


def test_ddp_averages_gradients_of_weights_in_bf16_in_float32(alone_in_a_group, model, monkeypatch):
    gradient_state = SimpleNamespace(plugin_kwargs={})
    accelerator = SimpleNamespace(gradient_state=gradient_state, no_sync=DistributedDataParallel.no_sync)
    wrapped = DistributedDataParallel(in_bf16(model), gradient_as_bucket_view=True)
    reduced = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: reduced.append(tensor.dtype) or tensor.mul_(2))
    for sizes in ([256, 1, 1], [5]):
        assert add_up(accelerator, wrapped, sizes).tolist() == [2.0 * sum(sizes)] * 2
        wrapped.zero_grad()
    num_trained = sum(p.requires_grad for p in model.parameters())
    assert reduced == [torch.float32] * 2 * num_trained  # each once a step


class Third(torch.autograd.Function):
    """Has the gradient 1/3 in float32, as some that gpt-oss's experts have."""

    @staticmethod
    def forward(ctx, weight):
        return weight.sum()

    @staticmethod
    def backward(ctx, arriving):
        return torch.full((2,), 1 / 3)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_gradient_in_float32_of_a_weight_in_bf16_is_not_rounded_in_the_first_step_either(
    accelerator, model, num_micro_batches
):
    take_gradients_as_computed(in_bf16(model))
    for _ in range(2):
        for i in range(num_micro_batches):
            with accumulating(accelerator, model, is_last=i == num_micro_batches - 1):
                Third.apply(model.head.bias).backward()
        assert model.head.bias.grad.tolist() == pytest.approx([num_micro_batches / 3] * 2, rel=1e-6)
        clear_gradients(accelerator, trained(model))
