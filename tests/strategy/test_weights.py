"""Weights have their plain names and full values under every wrapper."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedConfig

from kit.strategy.weights import (
    generating,
    own_part,
    own_shards,
    own_start,
)


def gathered_layers(model):
    return [not hasattr(layer.inner.weight, "placements") for layer in model.layers]


@pytest.mark.parametrize("free", [10**9, 10])
def test_generation_keeps_whole_layers_where_they_fit_and_says_where_not(sharded, monkeypatch, capsys, free):
    prepared = sharded()
    model = prepared.accelerator.unwrap_model(prepared.model)
    model.get_input_embeddings = lambda: None
    model.config = PreTrainedConfig()
    model.generate = lambda synced_gpus: [model(torch.ones(1, 4)), gathered_layers(model)][1]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    with torch.no_grad(), generating(prepared.accelerator, prepared.model) as generate:
        assert generate() == [free > 10] * 2
    assert ("every layer for every token" in capsys.readouterr().out) == (free == 10)
    assert gathered_layers(model) == [False] * 2
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert gathered_layers(model) == [False] * 2  # training is as before


def test_after_a_pass_that_ended_midway_only_the_own_part_is_held(alone_in_a_group, model):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    model.unshard()
    assert not hasattr(model.head.weight, "placements")  # whole
    shards = own_shards(model)
    assert len(shards) == 6 and all(hasattr(shard, "placements") for shard in shards)


def test_a_model_whose_config_asks_for_the_loss_of_routers_generates(accelerator):
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**shape, **heads, output_router_logits=True))
    ids = torch.tensor([[3, 4, 5], [0, 6, 7]])
    inputs = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "max_new_tokens": 3, "do_sample": False}
    with generating(accelerator, model) as generate:
        assert generate(**inputs, pad_token_id=0).shape == (2, 6)
    assert model.config.output_router_logits


def test_a_shard_starts_at_its_position_in_the_full_weight():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for case in [((3,), 1), ((2, 2), 3)]:
        mesh, rank = case
        placements = [*[Replicate()] * (len(mesh) - 1), Shard(0)]
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(mesh).numel())
        try:
            devices = torch.distributed.init_device_mesh("cpu", mesh)
            for shape in ((7, 2, 5), (1, 2)):
                whole = torch.arange(torch.Size(shape).numel()).view(shape)
                shard = distribute_tensor(whole, devices, placements, src_data_rank=None)
                own = own_part(shard).flatten()
                assert len(own) == 0 or torch.equal(own, whole.flatten()[own_start(shard) :][: len(own)]), case
                assert own_start(whole) == 0, case
        finally:
            torch.distributed.destroy_process_group()
