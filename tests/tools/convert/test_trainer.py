"""What the Trainer of transformers is told means the same here."""

import pytest

from kit.config.optimisers import OPTIMISERS, OTHER_NAMES
from kit.tools.convert.draft import Draft, Group
from kit.tools.convert.trainer import (
    take_batch,
    take_common,
    take_evaluation,
    take_optimiser_that_shards,
    take_switches_off,
    take_topology,
)


def read(values, **of_draft):
    draft = Draft(dict(values), **of_draft)
    take_common(draft)
    take_evaluation(draft)
    return draft


def test_the_global_batch_is_the_product_of_what_makes_a_step():
    draft = Draft({"per_device_train_batch_size": "4", "gradient_accumulation_steps": 8}, num_processes=16)
    take_batch(draft, 1, 1)
    assert draft.values == {"global_batch_size": 512, "per_device_train_batch_size": 4}
    assert draft.notes["global_batch_size"] == "4 x 8 accumulated x 16 processes"


def test_processes_that_shared_a_sample_count_once():
    draft = Draft({"context_parallel_size": 2}, num_processes=8)
    take_batch(draft, 3, 1)
    assert draft.values["global_batch_size"] == 12


@pytest.mark.parametrize("optim", [*OPTIMISERS, *OTHER_NAMES])
def test_an_optimiser_of_the_same_maths_is_taken(optim):
    assert read({"optim": optim}).values["optim"] == OTHER_NAMES.get(optim, optim)


@pytest.mark.parametrize(
    ("optim", "typed", "taken", "group"),
    [
        ("adamw_bnb_8bit", {}, "adamw_torch_fused", Group.SPEED),
        ("paged_adamw_32bit", {}, "adamw_torch_fused", Group.SPEED),
        ("lion_8bit", {}, None, Group.LEARNS),
        ("adamw_torch", {}, "adamw_torch", None),
        (None, {}, None, None),
        ("adamw_8bit", {"optim": "adamw_8bit"}, "adamw_8bit", None),
    ],
)
def test_an_optimiser_that_cannot_be_sharded_is_replaced_where_weights_are(optim, typed, taken, group):
    draft = Draft({"optim": optim, "fsdp": "full_shard"}, typed=typed)
    take_common(draft)
    take_optimiser_that_shards(draft)
    assert draft.values.get("optim") == taken
    assert [each.group for each in draft.left_out if each.key == "optim"] == ([group] if group else [])


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"max_steps": -1, "warmup_ratio": 0.03, "warmup_steps": 0}, {"warmup_steps": 0.03}),
        ({"eval_steps": 0.5, "max_steps": 10}, {"max_steps": 10}),  # there are no data to evaluate on
        ({"save_steps": 0.1, "max_steps": 30}, {"max_steps": 30, "save_steps": 3}),
        ({"saves_per_epoch": 2, "max_steps": 30}, {"max_steps": 30, "save_steps": 15}),
        ({"save_strategy": "no", "save_steps": 100}, {}),
        ({"save_strategy": False}, {}),  # `no` in YAML
        ({"save_total_limit": -1}, {"save_total_limit": 0}),
        ({"report_to": "none", "run_name": "x"}, {}),
        ({"report_to": "wandb", "run_name": "x"}, {"report_to": ["wandb"], "run_name": "x"}),
        ({"tf32": False, "bf16": True, "torch_dtype": "bfloat16"}, {}),
    ],
)
def test_a_value_means_what_it_says(given, values):
    draft = read(given)
    said = {
        name: value for name, value in draft.values.items() if not draft.notes.get(name, "").startswith("the default")
    }
    assert said == values and not draft.given


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({"fsdp": "full_shard auto_wrap"}, "fsdp"),
        ({"fsdp": "full_shard auto_wrap offload"}, "fsdp_offload"),
        ({"fsdp": "", "fsdp_config": {}}, ""),
        ({"deepspeed": "ds_z2_config.json"}, "fsdp"),
        ({"deepspeed": "ds_z0_config.json"}, "ddp"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "ddp"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}}, "fsdp_offload"),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, "fsdp_hybrid"),
        ({"tensor_parallel_size": 2}, "fsdp"),
    ],
)
def test_the_config_does_what_sharding_did(given, config):
    assert read(given).config == config


def test_activations_that_fsdp_offloads_are_offloaded():
    draft = Draft({"fsdp": "full_shard", "fsdp_config": {"activation_cpu_offload": True, "reshard": True}})
    take_topology(draft)
    assert draft.config == "fsdp"
    assert draft.values == {"gradient_checkpointing": True, "activation_offload": True}


def test_a_switch_with_no_before_it_is_off():
    draft = Draft({"no_remove_unused_columns": True, "no_cuda": False})
    take_switches_off(draft)
    assert draft.given == {"remove_unused_columns": False, "no_cuda": False}


def test_a_deepspeed_file_that_is_there_is_read(tmp_path):
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert read({"deepspeed": str(tmp_path / "mine.json")}).config == "ddp"


def test_a_metric_that_is_not_there_would_keep_another_checkpoint():
    draft = Draft({"metric_for_best_model": "rouge"}, values={"eval_split_size": 5})
    take_evaluation(draft)
    assert [each.group for each in draft.left_out] == [Group.LEARNS]


@pytest.mark.parametrize(
    ("given", "method", "typed", "optim"),
    [
        ({"pure_bf16": True}, "full", {}, "adamw_bf16"),
        ({"bf16": "full", "optim": "adamw_torch_fused"}, "full", {}, "adamw_bf16"),
        ({"pure_bf16": False}, "full", {}, None),
        ({"pure_bf16": True}, "lora", {}, None),
        ({"pure_bf16": True}, "full", {"method": "lora"}, None),
        ({"pure_bf16": True, "optim": "paged_adamw_8bit"}, "full", {}, "paged_adamw_8bit"),
        ({"pure_bf16": True, "optim": "sgd"}, "full", {}, None),
    ],
)
def test_weights_in_bf16_stay_so_where_adamw_trains_them_all(given, method, typed, optim):
    draft = Draft(dict(given), values={"method": method}, typed=typed)
    take_common(draft)
    assert draft.values.get("optim") == optim
    assert (Group.SPEED in [each.group for each in draft.left_out]) is (
        given.get("pure_bf16", True) and optim != "adamw_bf16"
    )
