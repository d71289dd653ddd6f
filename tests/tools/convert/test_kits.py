"""Files of each kit become recipes that load and learn the same, or say by key what they cannot."""

import json

import pytest

from kit.config.prompt_format import question
from kit.system.errors import UserError
from kit.tools.convert.draft import Group

CHAT = {"path": "chats.jsonl", "type": "chat_template", "field_messages": "conversations"}
CHAT |= {"message_property_mappings": {"role": "from", "content": "value"}}
AXOLOTL = {
    "base_model": "meta-llama/Llama-3.2-1B",
    "chat_template": "llama3",
    "datasets": [CHAT],
    "val_set_size": 0.05,
    "adapter": "lora",
    "lora_r": 32,
    "lora_alpha": 16,
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
    "flash_attention": True,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
}
FACTORY = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_target": "all",
    "dataset": "mine",
    "template": "llama3",
    "cutoff_len": 1024,
    "max_samples": 500,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "bf16": True,
    "plot_loss": True,
}
INFO = {
    "mine": {"file_name": "mine.json", "formatting": "sharegpt", "columns": {"messages": "turns", "system": "system"}},
    "plain": {"file_name": "plain.json", "num_samples": 50},
    "hub": {"hf_hub_url": "a/b", "subset": "main", "columns": {"prompt": "question", "response": "answer"}},
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "rated": {
        "file_name": "rated.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "texts": {"file_name": "texts.json", "columns": {"prompt": "text"}},
    "films": {"file_name": "films.json", "columns": {"prompt": "q", "response": "a", "videos": "videos"}},
}
TRL = {
    "model_name_or_path": "mistralai/Mistral-7B-v0.1",
    "model_revision": "main",
    "torch_dtype": "bfloat16",
    "dataset_mixture": {"datasets": [{"id": "a/b", "config": "default", "split": "train_sft", "weight": 1.0}]},
    "max_seq_length": 2048,
    "max_steps": -1,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "eval_strategy": "no",
    "packing": False,
    "save_strategy": "no",
    "warmup_ratio": 0.1,
    "push_to_hub": True,
}
SWIFT = {
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "tuner_type": "lora",
    "dataset": ["a/b#500", "a/c:main#20", "mine.jsonl"],
    "split_dataset_ratio": 0.01,
    "max_length": 4096,
    "learning_rate": 1e-4,
    "gradient_accumulation_steps": 8,
    "eval_steps": 50,
    "deepspeed": "zero2",
}
FILES = {"axolotl": AXOLOTL, "LLaMA-Factory": FACTORY, "TRL": TRL, "ms-swift": SWIFT}


@pytest.fixture
def info(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))


def test_a_file_of_each_kit_becomes_a_recipe_with_all_that_it_says_and_its_defaults(converted, info):
    expected = {
        "axolotl": {
            "method": "lora", "lora_r": 32, "lora_dropout": 0, "dataset": "chats.jsonl", "chat_template": "llama3",
            "max_length": 4096, "packing": True, "eval_split_size": 0.05, "global_batch_size": 16,
            "learning_rate": 2e-5, "optim": "adamw_8bit", "warmup_steps": 0.1, "eval_strategy": "epoch",
            "excess_length_strategy": "drop",
        },
        "LLaMA-Factory": {
            "lora_target_modules": "all-linear", "lora_r": 8, "lora_alpha": 16, "learning_rate": 5e-5,
            "lr_scheduler_type": "linear", "save_steps": 500, "save_total_limit": 0, "global_batch_size": 32,
        },
        "TRL": {  # which learns every token of a conversation, and checkpoints activations without being told
            "method": "full", "dataset": "a/b", "dataset_split": "train_sft", "global_batch_size": 64,
            "save_strategy": "no", "train_on": "all", "gradient_checkpointing": True, "learning_rate": 2e-5,
        },
        "ms-swift": {
            "method": "lora", "lora_r": 8, "weight_decay": 0.1, "global_batch_size": 16, "eval_split_size": 0.01,
            "eval_steps": 50, "excess_length_strategy": "drop", "lora_target_modules": "all-linear",
        },
    }  # fmt: skip
    for kit, settings in expected.items():
        result, recipe = converted(FILES[kit], num_processes=2)
        assert (result.kit, result.config) == (kit, "fsdp" if kit == "ms-swift" else "ddp")
        assert {name: getattr(recipe, name) for name in settings} == settings
    data = [(entry.path, entry.config, entry.max_samples) for entry in recipe.dataset]
    assert data == [("a/b", None, 500), ("a/c", "main", 20), ("mine.jsonl", None, None)]
    [mine] = converted(FACTORY)[1].dataset  # a slice is for a hub id
    assert (mine.path, mine.columns, mine.max_samples) == ("data/mine.json", {"turns": "conversations"}, 500)
    result, _ = converted(AXOLOTL)
    left_out = {"flash_attention": Group.SPEED, "bf16": Group.NEEDLESS, "special_tokens.pad_token": Group.NEEDLESS}
    assert {each.key: each.group for each in result.left_out} == left_out
    result, _ = converted(FACTORY | {"quantization_bit": 4, "double_quantization": False})
    assert "double_quantization" in {each.key for each in result.left_out}


def test_a_key_means_what_its_value_says(converted, info):
    floor = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    pairs = {"datasets": [CHAT | {"type": "chat_template.argilla"}]}
    gkd = {"rlhf_type": "gkd", "teacher_model": "t", "target_modules": None}
    rated = {"desirable_weight": 1, "max_seq_length": None, "packing": None}
    megatron = {"gradient_accumulation_steps": None, "tuner_type": None}
    cases = [
        ("axolotl", {"load_in_4bit": True, "adapter": "qlora"}, {"method": "qlora"}),
        ("axolotl", {"evals_per_epoch": 4, "num_epochs": 1}, {"eval_steps": 0.25}),
        ("axolotl", pairs | {"rl": "ipo", "lora_dropout": 0.1}, {"dpo_loss": "ipo", "lora_dropout": 0}),
        (
            "axolotl",
            pairs | {"rl": "dpo", "dpo_loss_type": ["apo_zero"], "rpo_alpha": 0.5},
            {"objective": "dpo", "dpo_loss": "apo_zero", "rpo_alpha": 0.5},
        ),
        (
            "axolotl",
            {"tiled_mlp": True, "activation_offloading": "legacy"},
            {"tiled_mlp": True, "activation_offload": True},
        ),
        (
            "axolotl",
            {"processor_type": "AutoProcessor", "adapter": None, "chat_template": None},
            {"method": "full", "train_only": ["vision", "projector", "language"]},
        ),
        ("axolotl", {"experts_implementation": "batched_mm"}, {"experts_implementation": "batched_mm"}),
        ("axolotl", {"experts_implementation": "scattermoe"}, {"experts_implementation": "auto"}),
        ("axolotl", {"datasets": [{"path": "ids"}]}, {"dataset": "ids", "dataset_columns": {}}),
        ("LLaMA-Factory", {"dataset": "hub"}, {"dataset_columns": {"question": "instruction", "answer": "output"}}),
        ("LLaMA-Factory", {"dataset": "texts", "stage": "pt", "template": "x"}, {"packing": True}),
        (
            "LLaMA-Factory",
            {"stage": "dpo", "dataset": "pairs", "pref_loss": "simpo"},
            {"objective": "simpo", "beta": 0.1},
        ),
        ("LLaMA-Factory", {"stage": "dpo", "dataset": "pairs", "pref_ftx": 0.2}, {"rpo_alpha": 0.2}),
        ("TRL", floor, {"min_lr_rate": 0.1}),
        ("TRL", rated | {"train_sampling_strategy": "random"}, {"shuffle": True}),
        (
            "TRL",
            {"dataset_mixture": None, "dataset_name": "a/b", "dataset_config": "main", "eval_strategy": "epoch"},
            {"dataset_config": "main", "has_evaluation": True},
        ),
        ("ms-swift", {"eval_steps": None, "save_steps": 20}, {"eval_steps": 20}),
        ("ms-swift", {"experts_impl": "eager"}, {"experts_implementation": "eager"}),
        ("ms-swift", {"rlhf_type": "dpo", "loss_type": "bco_pair"}, {"dpo_loss": "bco_pair", "rpo_alpha": 0}),
        ("ms-swift", {"task_type": "seq_cls", "problem_type": "regression"}, {"problem_type": "regression"}),
        ("ms-swift", {"rlhf_type": "simpo", "cpo_alpha": 0}, {"simpo_gamma": 1}),
        (
            "ms-swift",
            gkd,
            {"divergence": "jsd", "beta": 0.5, "on_policy_share": 0.5, "temperature": 0.9, "train_on": "last"},
        ),
        (
            "ms-swift",
            gkd | {"lmbda": 0, "beta": 1},
            {"divergence": "reverse_kl", "on_policy_share": 0, "temperature": None},
        ),
        (
            "ms-swift",
            megatron | {"micro_batch_size": 2},
            {"global_batch_size": 16, "method": "full"},
        ),
    ]
    for kit, given, expected in cases:
        _, recipe = converted(FILES[kit] | given, num_processes=2)
        assert {name: getattr(recipe, name) for name in expected} == expected, (kit, given)


def test_the_global_batch_counts_the_processes_that_read_different_samples(converted, info):
    result, recipe = converted(AXOLOTL | {"context_parallel_size": 2}, num_processes=8)
    assert (recipe.global_batch_size, result.sequence_parallel, result.config) == (32, 2, "ddp")
    assert converted(SWIFT | {"global_batch_size": 4}, num_processes=2)[0].notes["global_batch_size"] == ""
    shared = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    result, recipe = converted(FACTORY | shared, num_processes=8)
    assert (recipe.global_batch_size, recipe.per_device_train_batch_size, result.config) == (32, 2, "fsdp")


def test_what_changes_what_is_learned_is_refused_by_its_key_until_it_is_dropped(converted, info):
    cases = [
        ("axolotl", {"chat_template": "metharme"}, "chat_template"),
        ("axolotl", {"datasets": [CHAT | {"roles_to_train": ["human"]}]}, "datasets[0].roles_to_train"),
        ("axolotl", {"a_key_of_tomorrow": 3}, "a_key_of_tomorrow"),
        ("axolotl", {"plugins": ["axolotl.integrations.liger.LigerPlugin", "mine.Plugin"]}, "plugins"),
        ("ms-swift", {"system": "prompt.txt"}, "system"),
        ("axolotl", {"fsdp": ["full_shard"]}, "optimizer"),
        ("ms-swift", {"freeze_vit": False}, "freeze_vit"),
    ]
    for kit, given, key in cases:
        with pytest.raises(UserError) as refused:
            converted(FILES[kit] | given)
        assert [problem.fix for problem in refused.value.problems] == [f"--drop {key} leaves it out"], (kit, given)
        result, _ = converted(FILES[kit] | given, drop=[key])
        assert {each.key for each in result.left_out if each.group is Group.TRAINING} == {key}


def test_what_no_drop_helps_is_refused_and_another_kind_of_training_alone(converted, info):
    cases = [
        ("axolotl", {"rl": "grpo", "min_sample_len": 3}, ["rl"], "reward functions are code"),
        ("axolotl", {"datasets": [{"path": "a", "type": "jeopardy"}]}, ["datasets[0].type"], "has its own prompt text"),
        (
            "LLaMA-Factory",
            {"do_train": None, "train_dataset": "v1.yaml"},
            ["train_dataset"],
            "its v1 are not supported",
        ),
        ("LLaMA-Factory", {"dataset": "nowhere"}, ["dataset"], "not in data/dataset_info.json"),
        ("TRL", {"num_processes": "auto"}, ["theirs.yaml"], "could not convert string to float: 'auto'"),
    ]
    for kit, given, keys, says in cases:
        with pytest.raises(UserError, match=says) as refused:
            converted(FILES[kit] | given, drop=["min_sample_len"])
        assert [problem.where.rpartition("/")[2] for problem in refused.value.problems] == keys, given


def test_a_key_whose_value_does_not_fit_can_be_dropped(converted):
    _, recipe = converted(AXOLOTL | {"optimizer": "adamw_torch_4bit"}, drop=["optimizer"])
    assert recipe.optim == "adamw_torch_fused"


def test_the_config_shards_what_the_file_shards(converted):
    for topology, config in (
        ({"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_version": 2}}, "fsdp"),
        ({"deepspeed": "deepspeed_configs/zero1.json"}, "ddp"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}}}, "fsdp"),
    ):
        assert converted(AXOLOTL | topology | {"optimizer": "adamw_torch"}, 8)[0].config == config, topology


def test_rows_get_the_columns_and_the_wording_that_the_other_kit_has(converted, info):
    texts = [{"path": "a/b", "data_files": ["c/d.jsonl"], "type": "completion", "field": "chapter", "revision": "v1"}]
    _, recipe = converted(AXOLOTL | {"datasets": texts, "chat_template": None})
    assert (recipe.dataset, recipe.dataset_columns) == ("hf://datasets/a/b@v1/c/d.jsonl", {"chapter": "text"})
    assert recipe.excess_length_strategy == "split"
    pairs = CHAT | {"type": "chat_template.default", "field_chosen": "good", "field_rejected": "bad"}
    _, recipe = converted(AXOLOTL | {"rl": "dpo", "rl_beta": 0.3, "datasets": [pairs]})
    assert (recipe.objective, recipe.beta) == ("dpo", 0.3)
    assert recipe.dataset_columns == {"conversations": "prompt", "good": "chosen", "bad": "rejected"}
    _, recipe = converted(AXOLOTL | {"rl": "dpo", "datasets": [{"path": "a/b", "type": "chatml.intel"}]})
    assert (recipe.chat_template, recipe.dataset_columns) == ("chatml", {"question": "instruction"})
    _, recipe = converted(AXOLOTL | {"datasets": [{"path": "a/b", "type": "alpaca"}]})
    asked = question(recipe.dataset[0].prompt_format, "Add.", "2, 2")
    assert recipe.chat_template == "bare" and asked.startswith(
        "Below is an instruction that describes a task, paired with"
    )
    assert asked.endswith("request.\n\n### Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n")
    assert "task. Write" in question(recipe.dataset[0].prompt_format, "Add.", "")
    _, recipe = converted(SWIFT | {"dataset": "a/alpaca:zh/en#9"})
    assert [(entry.config, question(entry.prompt_format, "Add.", "2, 2")) for entry in recipe.dataset] == [
        ("zh", "Add.\n2, 2"),
        ("en", "Add.\n2, 2"),
    ]
    _, recipe = converted(FACTORY | {"dataset": "plain, hub", "max_samples": 20})
    assert [(entry.path, entry.split, entry.max_samples) for entry in recipe.dataset] == [
        ("data/plain.json", None, 20),
        ("a/b", "train[:20]", None),
    ]
    assert question(recipe.dataset[0].prompt_format, "Add.", "2, 2") == "Add.\n2, 2"
    parts = [{"id": "a/b", "weight": 0.5}, {"id": "c/d", "weight": 1.0}]
    _, recipe = converted(TRL | {"dataset_mixture": {"datasets": parts, "test_split_size": 1000}})
    assert [(entry.path, entry.max_samples) for entry in recipe.dataset] == [("a/b", 0.5), ("c/d", None)]
    assert recipe.eval_split_size == 1000


def test_the_path_or_a_key_says_what_trl_trains_and_it_is_never_guessed(converted):
    least = {"model_name_or_path": "m", "dataset_name": "a/b"}
    for given, name, objective, rate in (
        ({"beta": 0.05}, "recipes/model/orpo/config.yaml", "orpo", 1e-6),
        ({}, "dpo_config.yaml", "dpo", 1e-6),
        ({"packing": True}, "theirs.yaml", "sft", 2e-5),
        ({"desirable_weight": 2.0}, "theirs.yaml", "kto", 1e-6),
    ):
        _, recipe = converted(least | given, name=name)
        assert (recipe.objective, recipe.learning_rate) == (objective, rate), name
    given = {"teacher_model_name_or_path": "t", "temperature": 0.5, "use_peft": True}
    _, recipe = converted(least | given, name="distillation.yaml")
    assert (recipe.divergence, recipe.on_policy_share, recipe.top_p) == ("reverse_kl", 1, None)
    assert (recipe.temperature, recipe.distil_temperature, recipe.lora_dropout) == (0.5, 0.5, 0.05)
    with pytest.raises(UserError, match="--objective sft, dpo"):
        converted(least | {"beta": 0.05})
    _, recipe = converted(least | {"beta": 0.05, "loss_type": "ipo"}, flags={"objective": "dpo"})
    assert (recipe.dpo_loss, recipe.learning_rate) == ("ipo", 1e-6)
    _, recipe = converted(least | {"loss_type": ["apo_zero", "sft"]}, flags={"objective": "dpo"})
    assert (recipe.dpo_loss, recipe.rpo_alpha) == ("apo_zero", 1)
    _, recipe = converted({"model_name_or_path": "m", "datasets": [{"path": "a/b"}], "packing": True})
    assert (recipe.dataset, recipe.train_on) == ("a/b", "all")


def test_data_that_are_typed_replace_those_of_the_file(converted):
    flags = {"dataset": "mine.jsonl"}
    given = {"datasets": [{"path": "a", "type": "jeopardy", "strange": 1}], "val_set_size": 500}
    result, recipe = converted(AXOLOTL | given, flags=flags)
    assert (recipe.dataset, recipe.has_evaluation) == ("mine.jsonl", False)
    assert {"datasets", "val_set_size"} <= {each.key for each in result.left_out}
    assert converted(AXOLOTL, flags=flags)[1].eval_split_size == 0.05
    assert converted(FACTORY | {"dataset_dir": "elsewhere"}, flags=flags)[1].dataset == "mine.jsonl"


def test_a_file_of_grpo_is_converted_once_the_rewards_are_named(converted):
    rollouts = {"reward_funcs": ["accuracy", "mine.format"], "max_completion_length": 256, "temperature": 0.7}
    trl = {name: TRL[name] for name in ("model_name_or_path", "gradient_accumulation_steps")} | rollouts
    trl |= {"dataset_name": "a/b", "per_device_train_batch_size": 16, "num_generations": 8, "use_vllm": True}
    with pytest.raises(UserError, match="reward functions are code"):
        converted(trl, name="grpo/theirs.yaml")
    flags = {"rewards": "number"}
    result, recipe = converted(trl | {"top_k": -1, "min_p": 0.1, "max_prompt_length": 100}, flags=flags)
    assert [(each.key, each.group) for each in result.left_out if "reward" in each.key or "vllm" in each.key] == [
        ("reward_funcs", Group.NEEDLESS),
        ("use_vllm", Group.SPEED),
    ]
    expected = {
        "objective": "grpo", "policy_loss": "dapo", "scale_rewards": "group", "beta": None, "rewards": ["number"],
        "rollout_temperature": 0.7, "rollout_top_k": 0, "rollout_min_p": 0.1, "rollout_top_p": 1, "temperature": None,
        "max_new_tokens": 256, "max_length": 356, "global_batch_size": 32, "num_generations": 8,
        "learning_rate": 1e-6,
    }  # fmt: skip
    assert {name: getattr(recipe, name) for name in expected} == expected
    swift = {name: SWIFT[name] for name in ("model", "tuner_type", "learning_rate")}
    swift |= {"rlhf_type": "grpo", "dataset": "a/b", **rollouts}
    axolotl = {name: AXOLOTL[name] for name in AXOLOTL if not name.startswith(("val", "evals"))} | {"rl": "grpo"}
    gspo = {"importance_sampling_level": "sequence", "loss_type": "dr_grpo", "scale_rewards": False}
    for given, name, wanted in (
        (trl, "rloo/theirs.yaml", {"policy_loss": "rloo", "beta": 0.05, "scale_rewards": "auto"}),
        (trl | gspo, "gspo/grpo.yaml", {"policy_loss": "gspo", "importance_sampling_level": None}),
        (trl | gspo, "theirs.yaml", {"policy_loss": "dr_grpo", "scale_rewards": "none", "by_sequence": True}),
        (trl | {"loss_type": "cispo", "epsilon_high": 5.0}, "theirs.yaml", {"policy_loss": "cispo", "epsilon_high": 4}),
        (trl | {"loss_type": "sapo", "scale_rewards": "batch"}, "theirs.yaml", {"policy_loss": "sapo"}),
        (trl | {"scale_rewards": "none"}, "theirs.yaml", {"policy_loss": "dapo", "scale_rewards": "none"}),
        (swift, "theirs.yaml", {"policy_loss": "grpo", "beta": 0.04, "rollout_top_p": 0.9, "rollout_top_k": 50}),
        (swift | {"loss_type": "sapo", "tau_pos": 0.5, "beta": 0}, "theirs.yaml", {"sapo_temperature_pos": 0.5}),
        (axolotl | {"trl": rollouts | {"beta": 0.1}}, "theirs.yaml", {"rollout_temperature": 0.7, "beta": 0.1}),
        (
            axolotl | {"rl": "gdpo", "trl": rollouts},
            "theirs.yaml",
            {"multi_objective_aggregation": "normalize_then_sum"},
        ),
    ):
        _, recipe = converted(given, name=name, flags={"rewards": "number", "max_length": 600})
        assert {name: getattr(recipe, name) for name in wanted} == wanted, given
    with pytest.raises(UserError, match="objective sft does not read it"):
        converted(SWIFT, flags=flags)
    with pytest.raises(UserError, match="policy_loss lists the losses"):
        converted(trl | {"loss_type": "bnpo"}, flags=flags)
    with pytest.raises(UserError, match="not multiplied by the probability ratio"):
        converted(trl | {"beta": 0.1}, flags=flags)
