"""Files of LLaMA-Factory become recipes that load and learn the same, or say by key what they cannot."""

import json

import pytest

from kit.config.prompt_format import question
from kit.errors import UserError

FILE = {
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
}
INFO = {
    "mine": {"file_name": "mine.json", "formatting": "sharegpt", "columns": {"messages": "turns", "system": "system"}},
    "plain": {"file_name": "plain.json"},
    "drawn": {"file_name": "drawn.json", "num_samples": 50},
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


@pytest.fixture
def of_file(converted, tmp_path):
    """Converts ``FILE`` with other values, beside a ``data/dataset_info.json``."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    return lambda values, **more: converted(FILE | values, **more)


def test_a_file_becomes_a_recipe_with_the_defaults_of_that_kit(of_file):
    result, recipe = of_file({})
    assert result.kit == "LLaMA-Factory"
    assert (recipe.method, recipe.lora_target_modules, recipe.lora_r, recipe.lora_alpha) == (
        "lora",
        "all-linear",
        8,
        16,
    )
    assert (recipe.dataset, recipe.dataset_columns) == ("data/mine.json", {"turns": "conversations"})
    assert (recipe.dataset_split, recipe.chat_template, recipe.max_length) == ("train[:500]", "llama3", 1024)
    assert (recipe.learning_rate, recipe.num_train_epochs, recipe.lr_scheduler_type) == (5e-5, 3, "linear")
    assert (recipe.warmup_steps, recipe.gradient_checkpointing, recipe.save_steps) == (0, True, 500)
    assert recipe.global_batch_size == 16


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"use_muon": True, "optim": "adamw_torch"}, "optim", "muon"),
        ({"quantization_bit": 4}, "method", "qlora"),
        ({"quantization_bit": 8}, "method", "lora"),
        ({"finetuning_type": "full"}, "method", "full"),
        ({"resume_from_checkpoint": None, "max_steps": -1}, "max_steps", None),
        ({"mask_history": True}, "train_on", "last"),
        ({"train_on_prompt": True}, "train_on", "all"),
        ({"use_dft_loss": True}, "objective", "dft"),
        ({"disable_gradient_checkpointing": True}, "gradient_checkpointing", False),
        ({"template": "qwen3_nothink"}, "chat_template", "chatml"),
        ({"dataset": "hub", "max_samples": None}, "dataset_columns", {"question": "instruction", "answer": "output"}),
        ({"dataset": "hub"}, "dataset_config", "main"),
        ({"dataset": "texts", "stage": "pt", "template": None}, "dataset_columns", {}),
        ({"dataset": "texts", "stage": "pt"}, "packing", True),
        ({"stage": "dpo", "dataset": "pairs"}, "dataset_columns", {"conversations": "prompt"}),
        ({"stage": "dpo", "dataset": "pairs", "pref_beta": 0.2}, "beta", 0.2),
        ({"stage": "dpo", "dataset": "pairs", "pref_loss": "simpo"}, "objective", "simpo"),
        ({"stage": "dpo", "dataset": "pairs", "pref_loss": "hinge"}, "dpo_loss", "hinge"),
        ({"stage": "kto", "dataset": "rated"}, "dataset_columns", {"messages": "completion"}),
        ({"report_to": "none"}, "report_to", []),
        ({"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50}, "eval_steps", 50),
    ],
)
def test_a_key_means_what_its_value_says(of_file, given, name, value):
    assert getattr(of_file(given)[1], name) == value


def test_an_input_follows_its_instruction_after_a_line_break(of_file):
    (entry,) = of_file({"dataset": "plain"})[1].dataset_entries
    assert question(entry.prompt_format, "Add.", "2, 2") == "Add.\n2, 2"
    assert question(entry.prompt_format, "Hi", "") == "Hi"


@pytest.mark.parametrize(("limit", "rows"), [(None, 50), (500, 50), (20, 20)])
def test_rows_that_dataset_info_draws_are_drawn(of_file, limit, rows):
    _, recipe = of_file({"dataset": "drawn", "max_samples": limit})
    assert (recipe.dataset[0].max_samples, recipe.dataset[0].split) == (rows, None)


def test_swanlab_and_offloaded_checkpoints_are_taken_over(of_file):
    given = {"use_swanlab": True, "swanlab_project": "p", "swanlab_run_name": "n", "use_unsloth_gc": True}
    _, recipe = of_file(given)
    assert (recipe.report_to, recipe.project, recipe.run_name) == (["swanlab"], "p", "n")
    assert (recipe.gradient_checkpointing, recipe.activation_offload) == (True, True)


def test_several_data_sets_are_one_list(of_file):
    _, recipe = of_file({"dataset": "mine, hub"})
    assert [entry.path for entry in recipe.dataset] == ["data/mine.json", "a/b"]
    assert [entry.split for entry in recipe.dataset] == ["train[:500]", "train[:500]"]


def test_oft_has_blocks_and_no_rank(of_file):
    oft = {"finetuning_type": "oft", "oft_block_size": 16, "oft_target": "q_proj,v_proj", "lora_rank": 8}
    converted, recipe = of_file(oft)
    assert (recipe.method, recipe.adapter_type, recipe.adapter_options) == ("lora", "oft", {"oft_block_size": 16})
    assert recipe.lora_target_modules == ["q_proj", "v_proj"] and "lora_r" not in converted.draft.values
    assert of_file({**oft, "quantization_bit": 4})[1].method == "qlora"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"template": "breeze"}, "template"),
        ({"use_galore": True}, "use_galore"),
        ({"pissa_init": True}, "pissa_init"),
    ],
)
def test_what_changes_what_is_learned_is_refused_by_its_key_until_it_is_dropped(of_file, given, key):
    with pytest.raises(UserError, match=f"--drop {key} leaves it out"):
        of_file(given)
    of_file(given, drop=[key])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stage": "rm"}, "nothing learns from rewards"),
        ({"dataset": "pictures"}, "reads only text"),
        ({"dataset": "nowhere"}, "not in data/dataset_info.json"),
        ({"dataset_dir": "elsewhere"}, "--dataset FILE"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(of_file, given, says):
    with pytest.raises(UserError, match=says):
        of_file(given)


def test_a_data_set_that_is_typed_settles_one_that_is_not_found(of_file):
    _, recipe = of_file({"dataset_dir": "elsewhere"}, flags={"dataset": "chats.jsonl"})
    assert recipe.dataset == "chats.jsonl"
