"""JSON files that say nothing of the model and the data ask for both, and then become recipes."""

import json

import pytest

from kit.errors import UserError

FLAGS = {"model_name_or_path": "m", "dataset": "d"}
ARGUMENTS = {"output_dir": "o", "per_device_train_batch_size": 4, "fsdp": [], "local_rank": -1, "_n_gpu": 1}
ARGUMENTS |= {"optim": "adamw_torch", "group_by_length": False, "dataloader_num_workers": 4, "max_steps": -1}
ZERO = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": 0.5}
ZERO |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}}
ZERO |= {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": "auto"}}}
ZERO |= {"train_micro_batch_size_per_gpu": "auto"}


def test_training_arguments_bring_the_defaults_of_transformers(converted):
    result, recipe = converted(json.dumps(ARGUMENTS), flags=FLAGS, name="theirs.json")
    assert (result.kit, recipe.method, recipe.global_batch_size) == ("transformers", "full", 4)
    assert (recipe.learning_rate, recipe.num_train_epochs, recipe.lr_scheduler_type) == (5e-5, 3, "linear")
    assert (recipe.optim, recipe.max_steps) == ("adamw_torch", None)


def test_a_deepspeed_file_brings_its_config_and_optimiser(converted):
    result, recipe = converted(json.dumps(ZERO), num_processes=2, flags=FLAGS, name="ds.json")
    assert (result.kit, result.config) == ("DeepSpeed", "fsdp_offload")
    assert (recipe.learning_rate, recipe.adam_beta2, recipe.max_grad_norm) == (1e-4, 0.95, 0.5)
    assert (recipe.lr_scheduler_type, recipe.warmup_steps) == ("linear", 10)


def test_a_batch_of_deepspeed_is_that_of_all_processes(converted):
    zero = {"zero_optimization": {"stage": 1}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    result, recipe = converted(json.dumps(zero), num_processes=4, flags=FLAGS, name="ds.json")
    assert (result.config, recipe.global_batch_size, recipe.per_device_train_batch_size) == ("ddp", 64, 4)


@pytest.mark.parametrize("text", [ARGUMENTS, ZERO])
def test_what_is_missing_is_asked_for_by_its_flag(converted, text):
    with pytest.raises(UserError, match="--model_name_or_path NAME"):
        converted(json.dumps(text), name="theirs.json")
