"""Files of each kit become recipes that load and learn the same, or say by key what they cannot."""

import json

import pytest

from kit.config.prompt_format import question
from kit.errors import UserError
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
    "pictures": {"file_name": "pictures.json", "columns": {"prompt": "q", "response": "a", "images": "images"}},
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
TEMPLATE = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"


@pytest.fixture
def info(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))


def test_a_file_of_axolotl_becomes_a_recipe_with_all_that_it_says_and_its_defaults(converted):
    result, recipe = converted(AXOLOTL, num_processes=2)
    assert (result.draft.kit, result.config, recipe.model_name_or_path) == ("axolotl", "ddp", "meta-llama/Llama-3.2-1B")
    assert (recipe.method, recipe.lora_r, recipe.lora_alpha, recipe.lora_dropout) == ("lora", 32, 16, 0)
    assert recipe.lora_target_modules == "all-linear"
    assert (recipe.dataset, recipe.dataset_columns, recipe.chat_template) == ("chats.jsonl", {}, "llama3")
    assert (recipe.max_length, recipe.packing, recipe.eval_split_size) == (4096, True, 0.05)
    assert (recipe.global_batch_size, recipe.per_device_train_batch_size) == (16, 2)
    assert (recipe.num_train_epochs, recipe.learning_rate, recipe.optim) == (3, 2e-5, "adamw_8bit")
    assert (recipe.warmup_steps, recipe.eval_strategy, recipe.save_strategy) == (0.1, "epoch", "epoch")
    assert (recipe.excess_length_strategy, recipe.save_total_limit) == ("drop", 4)
    assert {each.key: each.group for each in result.draft.left_out} == {
        "flash_attention": Group.SPEED,
        "bf16": Group.NEEDLESS,
        "special_tokens.pad_token": Group.NEEDLESS,
    }
    plain, recipe = converted({key: value for key, value in AXOLOTL.items() if key != "warmup_ratio"})
    assert recipe.warmup_steps == 0.03 and "which warms up for at most 100 steps" in plain.text([])


def test_a_file_of_llama_factory_becomes_a_recipe_with_its_defaults(converted, info):
    result, recipe = converted(FACTORY)
    assert (result.draft.kit, result.config, recipe.method) == ("LLaMA-Factory", "single", "lora")
    assert (recipe.lora_target_modules, recipe.lora_r, recipe.lora_alpha) == ("all-linear", 8, 16)
    assert (recipe.dataset, recipe.dataset_columns) == ("data/mine.json", {"turns": "conversations"})
    assert (recipe.dataset_split, recipe.chat_template, recipe.max_length) == ("train[:500]", "llama3", 1024)
    assert (recipe.learning_rate, recipe.num_train_epochs, recipe.lr_scheduler_type) == (5e-5, 3, "linear")
    assert (recipe.warmup_steps, recipe.gradient_checkpointing, recipe.save_steps) == (0, True, 500)
    assert recipe.global_batch_size == 16


def test_a_file_of_trl_becomes_a_recipe_with_its_defaults(converted):
    result, recipe = converted(TRL, num_processes=8)
    assert (result.draft.kit, result.config, recipe.method) == ("TRL", "ddp", "full")
    assert (recipe.dataset, recipe.dataset_split, recipe.dataset_config) == ("a/b", "train_sft", None)
    assert (recipe.max_length, recipe.global_batch_size, recipe.max_steps) == (2048, 256, None)
    assert (recipe.save_strategy, recipe.model_revision, recipe.warmup_steps) == (None, None, 0.1)
    # TRL learns every token of a conversation, and checkpoints activations without being told.
    assert (recipe.train_on, recipe.gradient_checkpointing, recipe.learning_rate) == ("all", True, 2e-5)


def test_a_file_of_ms_swift_becomes_a_recipe_with_its_defaults(converted):
    result, recipe = converted(SWIFT, num_processes=2)
    assert (result.draft.kit, result.config, recipe.method) == ("ms-swift", "fsdp", "lora")
    data = [(entry.path, entry.config, entry.max_samples) for entry in recipe.dataset]
    assert data == [("a/b", None, 500), ("a/c", "main", 20), ("mine.jsonl", None, None)]
    assert (recipe.lora_r, recipe.lora_alpha, recipe.lora_dropout) == (8, 32, 0.05)
    assert (recipe.weight_decay, recipe.adam_beta2, recipe.num_train_epochs) == (0.1, 0.95, 3)
    assert (recipe.global_batch_size, recipe.eval_split_size, recipe.eval_steps) == (16, 0.01, 50)
    assert (recipe.excess_length_strategy, recipe.lora_target_modules) == ("drop", "all-linear")


def test_a_key_means_what_its_value_says(converted, info):
    dpo = {"stage": "dpo", "dataset": "pairs"}
    floor = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    cases = [
        ("axolotl", {"load_in_4bit": False}, "method", "lora"),
        ("axolotl", {"load_in_4bit": True, "adapter": "qlora"}, "method", "qlora"),
        ("axolotl", {"adapter": None}, "method", "full"),
        ("axolotl", {"train_on_inputs": False, "max_steps": -1}, "train_on", "assistant"),
        ("axolotl", {"wandb_project": "p", "wandb_name": ""}, "report_to", ["wandb"]),
        ("axolotl", {"wandb_project": "p", "use_wandb": False}, "report_to", []),
        ("axolotl", {"warmup_steps": 10}, "warmup_steps", 10),
        ("axolotl", {"evals_per_epoch": 4, "num_epochs": 1}, "eval_steps", 0.25),
        ("axolotl", {"saves_per_epoch": 2}, "save_steps", 0.166666),
        ("axolotl", {"val_set_size": 0, "evals_per_epoch": 4}, "eval_strategy", None),
        (
            "axolotl",
            {"lora_target_linear": False, "lora_target_modules": ["q_proj"]},
            "lora_target_modules",
            ["q_proj"],
        ),
        ("axolotl", {"cosine_min_lr_ratio": 0.1}, "min_lr_rate", 0.1),
        ("axolotl", {"rl": "ipo", "datasets": [CHAT | {"type": "chat_template.argilla"}]}, "dpo_loss", "ipo"),
        ("axolotl", {"use_eaft": True, "eaft_k": 20}, "objective", "eaft"),
        ("axolotl", {"context_parallel_size": 2}, "global_batch_size", 32),
        ("LLaMA-Factory", {"use_muon": True, "optim": "adamw_torch"}, "optim", "muon"),
        ("LLaMA-Factory", {"quantization_bit": 4}, "method", "qlora"),
        ("LLaMA-Factory", {"quantization_bit": 8}, "method", "lora"),
        ("LLaMA-Factory", {"finetuning_type": "full"}, "method", "full"),
        ("LLaMA-Factory", {"mask_history": True}, "train_on", "last"),
        ("LLaMA-Factory", {"use_dft_loss": True}, "objective", "dft"),
        ("LLaMA-Factory", {"disable_gradient_checkpointing": True}, "gradient_checkpointing", False),
        ("LLaMA-Factory", {"use_unsloth_gc": True}, "activation_offload", True),
        ("LLaMA-Factory", {"dataset": "hub"}, "dataset_columns", {"question": "instruction", "answer": "output"}),
        ("LLaMA-Factory", {"dataset": "texts", "stage": "pt", "template": "x"}, "packing", True),
        ("LLaMA-Factory", dpo, "dataset_columns", {"conversations": "prompt"}),
        ("LLaMA-Factory", dpo | {"pref_loss": "simpo", "pref_beta": 2.0}, "objective", "simpo"),
        ("LLaMA-Factory", dpo | {"pref_loss": "hinge"}, "dpo_loss", "hinge"),
        ("LLaMA-Factory", {"stage": "kto", "dataset": "rated"}, "dataset_columns", {"messages": "completion"}),
        ("LLaMA-Factory", {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50}, "eval_steps", 50),
        ("TRL", {"use_peft": True, "load_in_4bit": True}, "method", "qlora"),
        ("TRL", {"use_peft": True}, "lora_target_modules", ["q_proj", "v_proj"]),
        ("TRL", {"assistant_only_loss": True}, "train_on", "assistant"),
        ("TRL", floor, "min_lr_rate", 0.1),
        ("TRL", {"beta": 0.05, "loss_type": "ipo"}, "dpo_loss", "ipo"),
        ("TRL", {"loss_type": ["hinge"]}, "objective", "dpo"),
        ("TRL", {"loss_type": ["nll"]}, "objective", "sft"),
        ("TRL", {"optim": "paged_adamw"}, "optim", "paged_adamw_32bit"),
        ("TRL", {"chat_template": "chatml"}, "chat_template", "chatml"),
        ("TRL", {"dataset_mixture": None, "dataset_name": "a/b", "eval_strategy": "epoch"}, "eval_dataset", "a/b"),
        ("ms-swift", {"gradient_accumulation_steps": None}, "global_batch_size", 16),
        ("ms-swift", {"tuner_type": "full"}, "learning_rate", 1e-4),
        ("ms-swift", {"truncation_strategy": "left"}, "excess_length_strategy", "keep_end"),
        ("ms-swift", {"rlhf_type": "simpo"}, "simpo_gamma", 1),
        ("ms-swift", {"system": "Be brief.\\nBe kind."}, "system_prompt", "Be brief.\nBe kind."),
        ("ms-swift", {"loss_scale": "last_round"}, "train_on", "last"),
        ("ms-swift", {"optimizer": "lorap", "lorap_lr_ratio": 16}, "loraplus_lr_ratio", 16),
    ]
    for kit, given, name, value in cases:
        found = getattr(
            converted(FILES[kit] | given, num_processes=8 if "context_parallel_size" in given else 2)[1], name
        )
        assert found == value, (kit, given, found)


def test_what_changes_what_is_learned_is_refused_by_its_key_until_it_is_dropped(converted, info):
    cases = [
        ("axolotl", {"optimizer": "lion_pytorch"}, "optimizer"),
        ("axolotl", {"lr_scheduler": "rex"}, "lr_scheduler"),
        ("axolotl", {"chat_template": "metharme"}, "chat_template"),
        ("axolotl", {"datasets": [CHAT | {"roles_to_train": ["human"]}]}, "datasets[0].roles_to_train"),
        ("axolotl", {"datasets": [CHAT | {"train_on_eos": "last"}]}, "datasets[0].train_on_eos"),
        ("axolotl", {"datasets": [CHAT | {"shards": 4}]}, "datasets[0].shards"),
        ("axolotl", {"a_key_of_tomorrow": 3}, "a_key_of_tomorrow"),
        ("axolotl", {"tokens": True}, "tokens"),
        ("axolotl", {"plugins": ["axolotl.integrations.liger.LigerPlugin", "mine.Plugin"]}, "plugins"),
        ("axolotl", {"qat": {"weight_dtype": "int4"}}, "qat"),
        ("axolotl", {"processor_type": "AutoProcessor"}, "processor_type"),
        ("LLaMA-Factory", {"template": "breeze"}, "template"),
        ("LLaMA-Factory", {"use_galore": True}, "use_galore"),
        ("LLaMA-Factory", {"finetuning_type": "freeze"}, "finetuning_type"),
        ("TRL", {"beta": 0.1, "loss_type": "apo_zero"}, "loss_type"),
        ("TRL", {"beta": 0.1, "max_prompt_length": 512}, "max_prompt_length"),
        ("TRL", {"accelerate_config": "zero3"}, "accelerate_config"),
        ("ms-swift", {"system": "prompt.txt"}, "system"),
        ("ms-swift", {"tuner_type": "adalora"}, "tuner_type"),
        ("ms-swift", {"loss_scale": "react"}, "loss_scale"),
        ("ms-swift", {"dataset": ["swift/self-cognition#5", "a/b"]}, "dataset"),
        ("ms-swift", {"external_plugins": "mine.py"}, "external_plugins"),
    ]
    for kit, given, key in cases:
        with pytest.raises(UserError) as refused:
            converted(FILES[kit] | given)
        assert [problem.fix for problem in refused.value.problems] == [f"--drop {key} leaves it out"], (kit, given)
        result, _ = converted(FILES[kit] | given, drop=[key])
        assert {each.key for each in result.draft.left_out if each.group is Group.LEARNS} == {key}


def test_what_no_drop_helps_is_refused_and_another_kind_of_training_alone(converted, info):
    cases = [
        ("axolotl", {"rl": "grpo", "min_sample_len": 3}, ["rl"], "nothing learns from rewards"),
        ("axolotl", {"reward_model": True}, ["reward_model"], "nothing learns from rewards"),
        ("axolotl", {"datasets": [{"path": "a", "type": "input_output"}]}, ["datasets[0].type"], "--dataset FILE"),
        ("axolotl", {"datasets": [{"path": "a", "type": "alpaca:phi"}]}, ["datasets[0].type"], "--dataset FILE"),
        ("axolotl", {"base_model": "$MODEL"}, ["model_name_or_path"], "--model_name_or_path NAME"),
        ("LLaMA-Factory", {"stage": "rm"}, ["stage"], "nothing learns from rewards"),
        ("LLaMA-Factory", {"do_train": None}, ["do_train"], "trains nothing"),
        ("LLaMA-Factory", {"do_train": None, "train_dataset": "v1.yaml"}, ["train_dataset"], "its v1 are not read"),
        ("LLaMA-Factory", {"dataset": "pictures"}, ["dataset"], "images"),
        ("LLaMA-Factory", {"dataset": "nowhere"}, ["dataset"], "not in data/dataset_info.json"),
        ("TRL", {"num_processes": "auto"}, ["theirs.yaml"], "could not convert string to float: 'auto'"),
        ("LLaMA-Factory", {"max_samples": True}, ["theirs.yaml"], "True, which is no number"),
        ("axolotl", {"save_total_limit": True}, ["theirs.yaml"], "True, which is no number"),
        ("ms-swift", {"rlhf_type": "grpo"}, ["rlhf_type"], "nothing learns from rewards"),
        ("ms-swift", {"task_type": "seq_cls"}, ["task_type"], "causal language models only"),
    ]
    for kit, given, keys, says in cases:
        with pytest.raises(UserError, match=says) as refused:
            converted(FILES[kit] | given, drop=["min_sample_len"])
        assert [problem.where.rpartition("/")[2] for problem in refused.value.problems] == keys, given


def test_the_config_shards_what_the_file_shards(converted):
    cases = [
        ({}, 1, "single"),
        ({"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": True}}, 8, "fsdp_offload"),
        ({"fsdp_version": 2, "fsdp_config": {"offload_params": False}}, 8, "fsdp"),
        ({"deepspeed": "deepspeed_configs/zero1.json"}, 8, "ddp"),
        ({"deepspeed": "deepspeed_configs/zero3_bf16.json"}, 8, "fsdp"),
        ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, 8, "fsdp_offload"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}}}, 8, "fsdp"),
    ]
    for topology, num_processes, config in cases:
        assert converted(AXOLOTL | topology, num_processes)[0].config == config, topology


def test_rows_get_the_columns_and_the_wording_that_the_other_kit_has(converted, info):
    alpaca = {"datasets": [{"path": "rows.jsonl", "type": "alpaca"}], "chat_template": None}
    result, recipe = converted(AXOLOTL | alpaca)
    wording = question(recipe.dataset[0].prompt_format, "Add.", "2, 2")
    assert wording.startswith("Below is an instruction that describes a task, paired") and "### Input:\n2, 2" in wording
    assert result.draft.template.startswith("{%-")
    texts = [{"path": "a/b", "data_files": ["c/d.jsonl"], "type": "completion", "field": "chapter", "revision": "v1"}]
    _, recipe = converted(AXOLOTL | {"datasets": texts, "chat_template": None})
    assert (recipe.dataset, recipe.dataset_columns) == ("hf://datasets/a/b@v1/c/d.jsonl", {"chapter": "text"})
    assert recipe.excess_length_strategy == "split"
    pairs = CHAT | {"type": "chat_template.default", "field_chosen": "good", "field_rejected": "bad"}
    _, recipe = converted(AXOLOTL | {"rl": "dpo", "rl_beta": 0.3, "datasets": [pairs]})
    assert (recipe.objective, recipe.beta) == ("dpo", 0.3)
    assert recipe.dataset_columns == {"conversations": "prompt", "good": "chosen", "bad": "rejected"}
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


def test_the_folder_or_the_command_says_what_trl_trains(converted):
    _, recipe = converted(TRL | {"beta": 0.05}, name="recipes/model/orpo/config.yaml")
    assert (recipe.objective, recipe.beta, recipe.learning_rate) == ("orpo", 0.05, 1e-6)
    script = (
        "accelerate launch --num_processes 4 trl/scripts/dpo.py --model_name_or_path m --dataset_name a/b --beta 0.2"
    )
    result, recipe = converted(script, name="train.sh")
    assert (recipe.objective, recipe.beta, recipe.global_batch_size, result.config) == ("dpo", 0.2, 32, "ddp")


def test_a_template_in_the_file_gets_a_file_of_its_own(converted):
    assert converted(TRL | {"chat_template": TEMPLATE})[0].draft.template == TEMPLATE


def test_data_that_are_typed_replace_those_of_the_file(converted):
    flags = {"dataset": "mine.jsonl"}
    given = {"datasets": [{"path": "a", "type": "jeopardy", "strange": 1}], "val_set_size": 500}
    result, recipe = converted(AXOLOTL | given, flags=flags)
    assert (recipe.dataset, recipe.has_evaluation) == ("mine.jsonl", False)
    assert {"datasets", "val_set_size"} <= {each.key for each in result.draft.left_out}
    assert converted(AXOLOTL, flags=flags)[1].eval_split_size == 0.05
    assert converted(FACTORY | {"dataset_dir": "elsewhere"}, flags=flags)[1].dataset == "mine.jsonl"


SCRIPT = """\
# 4 GPUs
NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 \\
swift pt \\
    --model Qwen/Qwen3-8B \\
    --dataset 'a/b#500' \\
              c.jsonl \\
    --gradient-accumulation-steps 2 \\
    --lora_rank=8 2>&1 | tee log
rm -rf /
"""


def test_a_command_of_a_script_is_read_like_a_file(converted):
    result, recipe = converted(SCRIPT, name="train.sh")
    assert (result.draft.kit, result.config, recipe.model_name_or_path) == ("ms-swift", "ddp", "Qwen/Qwen3-8B")
    assert [(entry.path, entry.max_samples) for entry in recipe.dataset] == [("a/b", 500), ("c.jsonl", None)]
    assert (recipe.global_batch_size, recipe.lora_r, recipe.train_on) == (8, 8, "all")
    result, _ = converted(f"export NNODES=2\n{SCRIPT}", name="train.sh")
    assert result.draft.num_processes == 1  # all processes have to be typed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("swift infer --model m\n", "no command that trains"),
        ("trl sft --config b/c.yml", "stand in b/c.yml"),
        ("llamafactory-cli train a.yaml lr=1", "stand in a.yaml"),
        ("swift sft --model 'open", "No closing quotation"),
        ("swift sft --model $(cat secret) --dataset x", "model"),
        ("swift sft --model $MODEL --dataset x", "which another program fills in"),
    ],
)
def test_a_script_that_cannot_be_read_is_a_message_and_nothing_is_executed(converted, text, says):
    with pytest.raises(UserError, match=says):
        converted(text, name="run.sh")
