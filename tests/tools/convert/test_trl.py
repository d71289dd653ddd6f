"""Files of TRL and alignment-handbook become recipes that load and learn the same, or say by key what they cannot."""

import pytest

from kit.errors import UserError

FILE = {
    "model_name_or_path": "mistralai/Mistral-7B-v0.1",
    "model_revision": "main",
    "torch_dtype": "bfloat16",
    "dataset_mixture": {"datasets": [{"id": "a/b", "config": "default", "split": "train_sft", "weight": 1.0}]},
    "max_seq_length": 2048,
    "max_steps": -1,
    "num_train_epochs": 1,
    "learning_rate": 2e-5,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "eval_strategy": "no",
    "save_strategy": "no",
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "push_to_hub": True,
}
TEMPLATE = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"


def test_a_file_becomes_a_recipe_with_the_defaults_of_that_kit(converted):
    result, recipe = converted(FILE, num_processes=8)
    assert (result.kit, result.config, recipe.method) == ("TRL", "ddp", "full")
    assert (recipe.dataset, recipe.dataset_split, recipe.dataset_config) == ("a/b", "train_sft", None)
    assert (recipe.max_length, recipe.global_batch_size, recipe.max_steps) == (2048, 256, None)
    assert (recipe.save_strategy, recipe.model_revision, recipe.warmup_steps) == (None, None, 0.1)
    # TRL learns every token of a conversation, and checkpoints activations without being told.
    assert (recipe.train_on, recipe.gradient_checkpointing) == ("all", True)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"use_peft": True, "load_in_4bit": True, "lora_r": 8, "lora_alpha": 8}, "method", "qlora"),
        ({"use_peft": True, "lora_target_modules": "all-linear"}, "lora_target_modules", "all-linear"),
        ({"use_peft": True}, "lora_target_modules", ["q_proj", "v_proj"]),
        ({"load_in_4bit": False}, "method", "full"),
        ({"assistant_only_loss": True}, "train_on", "assistant"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, "min_lr_rate", 0.1),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}, "min_lr_rate", 0.5),
        ({"beta": 0.05, "assistant_only_loss": None}, "objective", "dpo"),
        ({"beta": 0.05, "loss_type": "ipo"}, "dpo_loss", "ipo"),
        ({"loss_type": "dft"}, "objective", "dft"),
        ({"loss_type": ["nll"]}, "objective", "sft"),
        ({"loss_type": "hinge"}, "objective", "dpo"),
        ({"optim": "paged_adamw"}, "optim", "paged_adamw_32bit"),
        ({"report_to": ["tensorboard", "wandb"]}, "report_to", ["tensorboard", "wandb"]),
    ],
)
def test_a_key_means_what_its_value_says(converted, given, name, value):
    assert getattr(converted(FILE | given)[1], name) == value


@pytest.mark.parametrize("folder", ["dpo", "orpo"])
def test_the_folder_of_a_file_says_which_trainer_reads_it(converted, folder):
    _, recipe = converted(FILE | {"beta": 0.05}, name=f"recipes/model/{folder}/config.yaml")
    assert (recipe.objective, recipe.beta) == (folder, 0.05)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"optim": "rmsprop"}, "optim"),
        ({"beta": 0.1, "loss_type": "apo_zero"}, "loss_type"),
        ({"beta": 0.1, "max_prompt_length": 512}, "max_prompt_length"),
    ],
)
def test_what_changes_what_is_learned_is_refused_by_its_key_until_it_is_dropped(converted, given, key):
    with pytest.raises(UserError, match=f"--drop {key} leaves it out"):
        converted(FILE | given)
    converted(FILE | given, drop=[key])


def test_a_weight_below_1_takes_this_share_of_the_rows(converted):
    parts = [{"id": "a/b", "weight": 0.5}, {"id": "c/d", "weight": 1.0}]
    _, recipe = converted(FILE | {"dataset_mixture": {"datasets": parts, "test_split_size": 1000}})
    assert [(entry.path, entry.max_samples) for entry in recipe.dataset] == [("a/b", 0.5), ("c/d", None)]
    assert recipe.eval_split_size == 1000


def test_a_chat_template_in_the_file_gets_a_file_of_its_own(converted):
    assert converted(FILE | {"chat_template": TEMPLATE})[0].draft.template == TEMPLATE


@pytest.mark.parametrize(
    ("flags", "config", "num_processes"),
    [
        ("--num_processes 4", "ddp", 4),
        ("--accelerate_config zero2", "fsdp", 8),
        ("--accelerate_config fsdp2 --num_processes 2", "fsdp", 2),
        ("--accelerate_config multi_gpu", "ddp", 8),
        ("--accelerate_config single_gpu", "single", 1),
        ("--accelerate_config mine.yaml", "fsdp_offload", 6),
    ],
)
def test_what_trl_hands_to_accelerate_says_how_many_processes_there_are(
    converted, tmp_path, flags, config, num_processes
):
    (tmp_path / "mine.yaml").write_text("num_processes: 6\nfsdp_config: {fsdp_offload_params: true}\n")
    script = f"trl sft --model_name_or_path m --dataset_name a/b --per_device_train_batch_size 2 {flags}"
    result, recipe = converted(script, name="train.sh")
    assert (result.config, result.draft.num_processes) == (config, num_processes)
    assert recipe.global_batch_size == 2 * num_processes
    assert converted(script, name="train.sh", num_processes=3)[1].global_batch_size == 6


def test_a_config_that_is_not_there_asks_for_the_number_of_processes(converted):
    script = "trl sft --model_name_or_path m --dataset_name a/b --accelerate_config elsewhere.yaml"
    with pytest.raises(UserError, match="--num_processes N"):
        converted(script, name="train.sh")
    assert converted(script, name="train.sh", num_processes=2)[1].global_batch_size == 16
