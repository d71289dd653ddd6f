"""Bytes are counted from shapes: frozen, trainable, optimiser; sharded or copied; on a disk, a host and a device."""

import pytest
import torch
from torch import nn

from kit.tools.doctor.needs import NF4_BYTES, frozen_bytes, measure, num_checkpoints


@pytest.fixture
def model():
    """1,000 frozen weights and 100 trainable ones, on meta."""
    with torch.device("meta"):
        model = nn.ModuleDict({"frozen": nn.Linear(100, 10, bias=False), "trained": nn.Linear(10, 10, bias=False)})
    model["frozen"].requires_grad_(False)
    return model


def needs(recipe, topology, model, local_world=2, **changes):
    return measure(
        recipe.model_copy(update={"method": "lora", **changes}), topology, model, local_world, torch.bfloat16
    )


def test_copies_of_ddp_are_whole_and_shards_of_fsdp_are_parts(recipe, topology, model):
    state = 1000 * 2 + 100 * 16
    assert needs(recipe, topology(device_type="cuda"), model).device == state
    assert needs(recipe, topology(device_type="cuda", strategy="fsdp2"), model).device == state // 2
    assert needs(recipe, topology(), model, async_save=False).host == 2 * state
    assert needs(recipe, topology(device_type="cuda", mixed_precision="no"), model).device == 4000 + 1600


def test_a_checkpoint_has_trained_weights_and_both_moments(recipe, topology, model):
    assert needs(recipe, topology(), model).checkpoint == 100 * 12
    assert needs(recipe, topology(), model, optim="adamw_8bit").checkpoint == 100 * 6
    assert needs(recipe, topology(), model, save_only_model=True).checkpoint == 100 * 4
    gpus = topology(device_type="cuda")
    assert needs(recipe, gpus, model).host == 1200 and needs(recipe, gpus, model, async_save=False).host == 0
    assert needs(recipe, gpus, model, local_world=1).host == 600  # of two machines, each holds its half


def test_each_rank_copies_its_shards_of_each_copy_of_hybrid_sharding(recipe, topology, model):
    gpus = topology(device_type="cuda", strategy="fsdp2", num_processes=4, num_replicas=2)
    assert needs(recipe, gpus, model, local_world=2).host == 1200  # a machine with a whole copy


def test_final_is_the_adapter_or_the_whole_model_in_its_dtype(recipe, topology, model):
    assert needs(recipe, topology(), model).final == 100 * 4
    assert needs(recipe, topology(), model, method="full").final == 1100 * 2


def test_who_reads_weights_into_host_memory_holds_them_whole(recipe, topology, model):
    whole = 1000 * 2 + 100 * 4
    assert needs(recipe, topology(), model).loading == 2 * whole
    assert needs(recipe, topology(device_type="cuda"), model).loading == 0
    assert needs(recipe, topology(device_type="cuda", strategy="fsdp1"), model).loading == 2 * whole
    sent = topology(device_type="cuda", strategy="fsdp2", load_on_rank0=True)
    assert needs(recipe, sent, model).loading == needs(recipe, sent, model, method="qlora").loading == whole
    assert needs(recipe, topology(device_type="cuda", strategy="fsdp1"), model, method="qlora").loading == 0


def test_offloaded_state_is_in_host_memory(recipe, topology, model):
    offloaded = needs(recipe, topology(device_type="cuda", strategy="fsdp2", offload=True), model, async_save=False)
    assert (offloaded.device, offloaded.host) == (0, 3600)


def test_4_bit_weights_count_with_their_scales():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = bitsandbytes.nn.Params4bit(torch.empty(64, 64, device="meta"), requires_grad=False)
    model = nn.ParameterList([weight, nn.Parameter(torch.empty(10, device="meta"), requires_grad=False)])
    assert frozen_bytes(model, 2) == round(4096 * NF4_BYTES) + 20
    assert pytest.approx(0.5159, abs=1e-4) == NF4_BYTES


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"save_steps": 0}, 1),
        ({"save_steps": 10, "save_total_limit": 2}, 3),
        ({"save_steps": 10, "save_total_limit": 0, "max_steps": 25}, 3),
        ({"save_steps": 10, "save_total_limit": 0, "max_steps": None}, None),
        ({"save_steps": 10, "save_strategy": "no"}, 1),
    ],
)
def test_the_checkpoint_that_is_being_written_counts_too(recipe, settings, number):
    assert num_checkpoints(recipe.model_copy(update=settings)) == number
