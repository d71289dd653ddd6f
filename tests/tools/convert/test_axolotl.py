"""Files of axolotl become recipes that load and learn the same, or say by key what they cannot."""

import pytest

from kit.errors import UserError
from kit.tools.convert.draft import Group

CHAT = {"path": "chats.jsonl", "type": "chat_template", "field_messages": "conversations"}
CHAT |= {"message_property_mappings": {"role": "from", "content": "value"}}
FILE = {
    "base_model": "meta-llama/Llama-3.2-1B",
    "chat_template": "llama3",
    "datasets": [CHAT],
    "val_set_size": 0.05,
    "output_dir": "./out",
    "adapter": "lora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "sequence_len": 4096,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": "2e-5",
    "bf16": "auto",
    "gradient_checkpointing": True,
    "warmup_ratio": 0.1,
    "evals_per_epoch": 1,
    "saves_per_epoch": 1,
}


def test_a_file_becomes_a_recipe_with_all_that_it_says(converted):
    result, recipe = converted(FILE, num_processes=2)
    assert (result.kit, result.config) == ("axolotl", "ddp")
    assert recipe.model_name_or_path == "meta-llama/Llama-3.2-1B"
    assert (recipe.method, recipe.lora_r, recipe.lora_alpha, recipe.lora_dropout) == ("lora", 32, 16, 0.05)
    assert recipe.lora_target_modules == "all-linear"
    assert (recipe.dataset, recipe.dataset_columns, recipe.chat_template) == ("chats.jsonl", {}, "llama3")
    assert (recipe.max_length, recipe.packing, recipe.eval_split_size) == (4096, True, 0.05)
    assert (recipe.global_batch_size, recipe.per_device_train_batch_size) == (16, 2)
    assert (recipe.num_train_epochs, recipe.learning_rate, recipe.optim) == (3, 2e-5, "adamw_8bit")
    assert (recipe.warmup_steps, recipe.eval_strategy, recipe.save_strategy) == (0.1, "epoch", "epoch")
    assert not [each for each in result.draft.left_out if each.group is Group.LEARNS]


def test_what_axolotl_does_without_being_told_is_written_out(converted):
    result, recipe = converted(FILE)
    # Longer samples are dropped there and cut here, and four checkpoints are kept there and two here.
    assert (recipe.excess_length_strategy, recipe.save_total_limit) == ("drop", 4)
    assert "the default of axolotl" in result.text([])


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"load_in_4bit": False}, "method", "lora"),
        ({"load_in_4bit": True, "adapter": "qlora"}, "method", "qlora"),
        ({"adapter": None, "lora_model_dir": None}, "method", "full"),
        ({"train_on_inputs": False}, "train_on", "assistant"),
        ({"max_steps": -1}, "max_steps", None),
        ({"wandb_project": None, "wandb_name": ""}, "report_to", []),
        ({"deepspeed": None, "fsdp": None, "fsdp_config": None}, "tf32", None),
        ({"wandb_project": "p"}, "report_to", ["wandb"]),
        ({"use_wandb": False, "wandb_project": "p"}, "report_to", []),
        ({"use_mlflow": True, "mlflow_experiment_name": "e"}, "report_to", ["mlflow"]),
        ({"use_mlflow": True, "mlflow_experiment_name": "e"}, "project", "e"),
        ({"use_comet": True, "use_tensorboard": True}, "report_to", ["comet_ml", "tensorboard"]),
        ({"plugins": ["axolotl.integrations.swanlab.SwanLabPlugin"], "swanlab_project": "s"}, "report_to", ["swanlab"]),
        ({"embedding_lr_scale": 0.5}, "embedding_learning_rate", 1e-5),
        ({"warmup_steps": 10}, "warmup_steps", 10),
        ({"save_steps": 0.25, "max_steps": 100, "saves_per_epoch": None}, "save_steps", 25),
        ({"evals_per_epoch": 4, "num_epochs": 1}, "eval_steps", 0.25),
        ({"saves_per_epoch": 2, "num_epochs": 3}, "save_steps", 0.166666),
        ({"val_set_size": 0, "evals_per_epoch": 4}, "eval_strategy", None),
        ({"lora_target_linear": False, "lora_target_modules": ["q_proj", "v_proj"]}, "lora_target_modules",
         ["q_proj", "v_proj"]),
        ({"lora_target_linear": None, "lora_target_modules": r"model.layers.[\d]+.(mlp|self_attn).(up|q|down)_proj"},
         "lora_target_modules", ["up_proj", "q_proj", "down_proj"]),
        ({"optimizer": "adamw_torch_4bit"}, "optim", "adamw_torch_fused"),
        ({"optimizer": "muon"}, "optim", "muon"),
        ({"cosine_min_lr_ratio": 0.1}, "min_lr_rate", 0.1),
        ({"cosine_min_lr_ratio": 1.0, "cosine_constant_lr_ratio": 0}, "lr_scheduler_type", "constant_with_warmup"),
        ({"tokens": {"pad_token": "<pad>"}}, "new_tokens", None),
        ({"lora_target_linear": None, "lora_target_modules": r".*\.layers\.[13]\.self_attn\.q_proj"},
         "lora_target_modules", [r".*\.layers\.[13]\.self_attn\.q_proj"]),
        ({"tokens": ["<a>"]}, "new_tokens", ["<a>"]),
        ({"batch_size": 8, "gradient_accumulation_steps": None}, "global_batch_size", 8),
        ({"lora_model_dir": "mine", "new_tokens": None}, "adapter_name_or_path", "mine"),
    ],
)  # fmt: skip
def test_a_key_means_what_its_value_says(converted, given, name, value):
    assert getattr(converted(FILE | given)[1], name) == value


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"optimizer": "lion_pytorch"}, "optimizer"),
        ({"lr_scheduler": "rex"}, "lr_scheduler"),
        ({"min_sample_len": 5}, "min_sample_len"),
        ({"chat_template": "metharme"}, "chat_template"),
        ({"datasets": [CHAT | {"roles_to_train": ["human"]}]}, "datasets[0].roles_to_train"),
        ({"datasets": [CHAT | {"train_on_eos": "last"}]}, "datasets[0].train_on_eos"),
        ({"datasets": [{"path": "a.jsonl", "type": "alpaca:phi"}], "chat_template": None}, "datasets.type"),
        ({"a_key_of_tomorrow": 3}, "a_key_of_tomorrow"),
    ],
)
def test_what_changes_what_is_learned_is_refused_by_its_key_until_it_is_dropped(converted, given, key):
    with pytest.raises(UserError) as refused:
        converted(FILE | given)
    assert [problem.fix for problem in refused.value.problems] == [f"--drop {key} leaves it out"]
    result, _ = converted(FILE | given, drop=[key])
    assert [each.key for each in result.draft.left_out if each.group is Group.LEARNS] == [key]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"rl": "grpo"}, "rl"),
        ({"reward_model": True}, "reward_model"),
        ({"processor_type": "AutoProcessor", "skip_prepare_dataset": True, "remove_unused_columns": False},
         "processor_type"),
        ({"datasets": [{"path": "a.jsonl", "type": "jeopardy"}]}, "datasets[0].type"),
    ],
)  # fmt: skip
def test_another_kind_of_training_is_refused_and_no_drop_helps(converted, given, key):
    with pytest.raises(UserError) as refused:
        converted(FILE | given, drop=[key])
    assert key in [problem.where for problem in refused.value.problems]


@pytest.mark.parametrize(
    ("topology", "num_processes", "config"),
    [
        ({}, 1, "single"),
        ({}, 8, "ddp"),
        ({"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": True}}, 8, "fsdp_offload"),
        ({"fsdp_version": 2, "fsdp_config": {"offload_params": False}}, 8, "fsdp"),
        ({"deepspeed": "deepspeed_configs/zero1.json"}, 8, "ddp"),
        ({"deepspeed": "deepspeed_configs/zero3_bf16.json"}, 8, "fsdp"),
        ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, 8, "fsdp_offload"),
    ],
)
def test_the_config_shards_what_the_file_shards(converted, topology, num_processes, config):
    assert converted(FILE | topology, num_processes)[0].config == config


def test_pairs_become_an_objective_with_its_columns(converted):
    data = {"path": "a/b", "type": "chat_template.default", "field_messages": "conversation", "split": "train[:10%]"}
    data |= {"field_chosen": "chosen", "field_rejected": "rejected"}
    _, recipe = converted(FILE | {"rl": "dpo", "rl_beta": 0.3, "datasets": [data]})
    assert (recipe.objective, recipe.beta, recipe.dataset_columns) == ("dpo", 0.3, {"conversation": "prompt"})
    assert (recipe.dataset, recipe.dataset_split) == ("a/b", "train[:10%]")


def test_texts_are_divided_as_there(converted):
    data = [{"path": "a/b", "type": "completion", "field": "chapter"}]
    _, recipe = converted(FILE | {"datasets": data, "chat_template": None})
    assert (recipe.dataset_columns, recipe.excess_length_strategy) == ({"chapter": "text"}, "split")


def test_data_sets_of_one_name_get_names_of_their_own(converted):
    _, recipe = converted(FILE | {"datasets": [CHAT, CHAT | {"split": "train[50%:]"}]})
    assert len({entry.name for entry in recipe.dataset}) == 2 and recipe.dataset[1].split == "train[50%:]"


def test_losses_of_tokens_and_noise_are_taken_over(converted):
    _, recipe = converted(FILE | {"use_eaft": True, "eaft_alpha": 1.0, "eaft_k": 20, "neftune_noise_alpha": 5})
    assert (recipe.objective, recipe.eaft_alpha, recipe.neftune_noise_alpha) == ("eaft", 1.0, 5)
    assert converted(FILE | {"use_eaft": False, "eaft_k": 20})[1].objective == "sft"


def test_one_shard_of_n_is_a_share_of_the_rows(converted):
    _, recipe = converted(FILE | {"datasets": [FILE["datasets"][0] | {"shards": 4}]})
    assert recipe.dataset[0].max_samples == 0.25


@pytest.mark.parametrize(
    ("given", "scheme", "size"),
    [
        (
            {"activation_dtype": "int8", "weight_dtype": "int4", "group_size": 64},
            "int8_dynamic_activation_int4_weight",
            64,
        ),
        ({"weight_dtype": "int4", "group_size": 64}, "int4_weight_only", 64),
        ({"activation_dtype": "torch.int8", "weight_dtype": "int8"}, "int8_dynamic_activation_int8_weight", 32),
    ],
)
def test_training_for_a_quantised_model_is_taken_over(converted, given, scheme, size):
    _, recipe = converted({**FILE, "qat": given | {"fake_quant_after_n_steps": 0}})
    assert (recipe.qat, recipe.qat_group_size) == (scheme, size)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"activation_dtype": "float8", "weight_dtype": "int4"}, "qat"),
        ({"weight_dtype": "int4", "quantize_embedding": True}, "qat.quantize_embedding"),
        ({"weight_dtype": "int4", "fake_quant_after_n_steps": 100}, "qat.fake_quant_after_n_steps"),
    ],
)
def test_what_is_not_rounded_here_is_refused_by_its_key(converted, given, key):
    with pytest.raises(UserError, match=key):
        converted({**FILE, "qat": given})


def test_a_file_of_a_hub_id_is_named_by_its_address(converted):
    data = {"path": "a/b", "data_files": ["c/d.jsonl"], "type": "completion", "revision": "v1"}
    _, recipe = converted(FILE | {"datasets": [data], "chat_template": None})
    assert [entry.path for entry in recipe.dataset_entries] == ["hf://datasets/a/b@v1/c/d.jsonl"]
    with pytest.raises(UserError, match="data_files"):
        converted(FILE | {"datasets": [data | {"data_files": ["c.jsonl", "d.jsonl"]}], "chat_template": None})
