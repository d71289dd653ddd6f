"""Bytes are counted from shapes: frozen, trainable, optimiser; sharded or copied; on a disk, a host and a device."""

import pytest
import torch
from torch import nn

from kit.config.command_line import read_recipe
from kit.memory.formulas import predict
from kit.memory.needs import frozen_bytes, needs_of_run
from kit.memory.sizes import NF4_BYTES
from kit.memory.workload import Workload
from kit.strategy.strategies import DDP, FSDP1, FSDP2, HYBRID, OFFLOAD
from kit.strategy.topology import Topology
from kit.tools.doctor.inputs import OpenedModel, check_model_opens
from kit.tools.plan.models import find_shape


@pytest.fixture(scope="module")
def recipe():
    """The recipe tiny, with an output folder."""
    return read_recipe([]).model_copy(update={"output_dir": "runs/tiny-ddp"})


@pytest.fixture
def topology():
    def topology(**changes):
        values = {"strategy": DDP, "config_name": "ddp", "num_processes": 2, "mixed_precision": "bf16"}
        return Topology(**({**values, "device_type": "cpu", "rehearsal": True} | changes))

    return topology


@pytest.fixture
def model():
    """1,000 frozen weights and 100 trainable ones, on meta."""
    with torch.device("meta"):
        model = nn.ModuleDict({"frozen": nn.Linear(100, 10, bias=False), "trained": nn.Linear(10, 10, bias=False)})
    model["frozen"].requires_grad_(False)
    return model


def needs(recipe, topology, model, local_world=2, **changes):
    return needs_of_run(
        recipe.model_copy(update={"method": "lora", **changes}), topology, model, local_world, torch.bfloat16
    )


def test_copies_of_ddp_are_whole_and_shards_of_fsdp_are_parts(recipe, topology, model):
    state = 1000 * 2 + 100 * 16
    assert needs(recipe, topology(device_type="cuda"), model).device == state
    assert needs(recipe, topology(device_type="cuda", strategy=FSDP2), model).device == state // 2
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
    gpus = topology(device_type="cuda", strategy=HYBRID, num_processes=4, num_replicas=2)
    assert needs(recipe, gpus, model, local_world=2).host == 1200  # a machine with a whole copy


def test_final_is_the_adapter_or_the_whole_model_in_its_dtype(recipe, topology, model):
    assert needs(recipe, topology(), model).final == 100 * 4
    assert needs(recipe, topology(), model, method="full").final == 1100 * 2


def test_who_reads_weights_into_host_memory_holds_them_whole(recipe, topology, model):
    whole = 1000 * 2 + 100 * 4
    assert needs(recipe, topology(), model).loading == 2 * whole
    assert needs(recipe, topology(device_type="cuda"), model).loading == 0
    assert needs(recipe, topology(device_type="cuda", strategy=FSDP1), model).loading == 2 * whole
    sent = topology(device_type="cuda", strategy=FSDP2, load_on_rank0=True)
    assert needs(recipe, sent, model).loading == needs(recipe, sent, model, method="qlora").loading == whole
    assert needs(recipe, topology(device_type="cuda", strategy=FSDP1), model, method="qlora").loading == 0


def test_offloaded_state_is_in_host_memory(recipe, topology, model):
    offloaded = needs(recipe, topology(device_type="cuda", strategy=OFFLOAD), model, async_save=False)
    assert (offloaded.device, offloaded.host) == (0, 3600)


def test_4_bit_weights_count_with_their_scales():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = bitsandbytes.nn.Params4bit(torch.empty(64, 64, device="meta"), requires_grad=False)
    model = nn.ParameterList([weight, nn.Parameter(torch.empty(10, device="meta"), requires_grad=False)])
    assert frozen_bytes(model, 2) == round(4096 * NF4_BYTES) + 20
    assert pytest.approx(0.5159, abs=1e-4) == NF4_BYTES


SAVES = {
    "no": {"save_strategy": "no", "save_steps": 0},
    "epoch": {"save_strategy": "epoch", "save_steps": 0, "max_steps": None, "num_train_epochs": 5},
    "epoch of unknown number": {"save_strategy": "epoch", "save_steps": 0, "max_steps": 100},
    "steps": {"save_strategy": "steps", "save_steps": 10, "max_steps": 45},
    "steps of unknown number": {"save_strategy": "steps", "save_steps": 10, "max_steps": None},
}


@pytest.fixture(scope="module")
def tiny(recipe):
    """The model of the recipe tiny, on meta."""
    opened = OpenedModel()
    assert check_model_opens(recipe.model_copy(update={"method": "full"}), opened).status == "ok"
    return opened.adapted


@pytest.mark.parametrize("save_only_model", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize(
    ("saves", "numbers"),
    [
        ("no", (1, 1, 1)),
        ("epoch", (5, 2, 3)),
        ("epoch of unknown number", (None, 2, 3)),
        ("steps", (5, 2, 3)),
        ("steps of unknown number", (None, 2, 3)),
    ],
)
def test_the_plan_and_the_doctor_count_the_same_checkpoints_of_the_same_size(
    saves, numbers, limit, save_only_model, recipe, topology, tiny
):
    """``numbers``: for a ``save_total_limit`` of 0, which keeps all, 1 and 2. The newest is written before one goes."""
    settings = {"method": "full", "save_total_limit": limit, "save_only_model": save_only_model, **SAVES[saves]}
    recipe = recipe.model_copy(update=settings)
    doctors = needs_of_run(recipe, topology(), tiny, 2, torch.float32)
    plans = predict(Workload.of(recipe, find_shape(recipe.model_name_or_path))).disk
    each = sum(parameter.numel() for parameter in tiny.parameters()) * (4 if save_only_model else 12)
    assert (doctors.num_checkpoints, doctors.checkpoint) == (numbers[limit], each)
    if numbers[limit] is None:
        assert plans["each checkpoint, all are kept"] == each and "checkpoints" not in plans
    else:
        assert plans["checkpoints"] == numbers[limit] * each
