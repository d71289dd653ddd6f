"""FSDP shards the right layers, computes in the precision of the config, and accumulates gradients in fp32."""

import os

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from kit.strategy.fsdp import (
    fsdp1_adapter_policy,
    fsdp_plugin,
    is_sharded_layer,
    num_replicas,
    own_shard,
    replica_groups,
)
from kit.strategy.strategies import FSDP1, FSDP2, HYBRID
from kit.strategy.topology import Topology


@pytest.fixture(autouse=True)
def _afresh(accelerate_starts_afresh):
    """The plugin reads variables, and so does peft."""


def topology(strategy, **changes):
    values = {"config_name": "fsdp", "num_processes": 1, "mixed_precision": "bf16", "device_type": "cpu"}
    return Topology(strategy=strategy, **(values | changes))


def test_layers_compute_in_bf16_and_gradients_add_up_in_fp32():
    policy = fsdp_plugin(topology(FSDP2)).mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy.output_dtype is None  # the loss stays in fp32
    policy = fsdp_plugin(topology(FSDP1)).mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy.buffer_dtype == torch.float32  # rotary frequencies
    for strategy in (FSDP2, FSDP1):
        assert fsdp_plugin(topology(strategy, mixed_precision="no")).mixed_precision_policy is None


def test_neighbours_share_a_replica_and_ranks_of_other_replicas_hold_the_same_shard(model):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        assert num_replicas(model) == 1 and own_shard(model.head.weight) == (0, 1)
        mesh = replica_groups(topology(HYBRID, num_processes=4, num_replicas=2)).get_device_mesh("cpu")
        assert mesh["dp_shard"].mesh.tolist() == [2, 3]
        fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
        assert num_replicas(model) == 2 and own_shard(model.head.weight) == (1, 2)
    finally:
        torch.distributed.destroy_process_group()


def test_under_fsdp1_trainable_leaves_are_units_apart_from_the_frozen_rest(alone_in_a_group, model):
    policy = fsdp1_adapter_policy(model, ("Layer",))
    assert os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Layer"
    cpu = torch.device("cpu")
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)
    units = [type(module.module).__name__ for module in wrapped.modules() if hasattr(module, "_fsdp_wrapped_module")]
    assert sorted(units) == ["Layer", "Layer", "Linear", "Linear", "Model"]  # Linear: of the second layer, and the head
    assert sum(is_sharded_layer(module, ("Layer",)) for module in wrapped.modules()) == 2
