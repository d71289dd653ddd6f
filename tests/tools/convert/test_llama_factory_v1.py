"""Files of LLaMA-Factory's second generation become recipes that load."""

import pytest

from kit.config.prompt_format import question
from kit.errors import UserError

FILE = {
    "model": "Qwen/Qwen3-4B",
    "model_class": "llm",
    "peft_config": {"name": "lora", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all"},
    "kernel_config": {"name": "auto"},
    "dist_config": {"name": "fsdp2", "dcp_path": None},
    "train_dataset": "data/mine.yaml",
    "micro_batch_size": 2,
    "cutoff_len": 512,
    "learning_rate": 1e-5,
    "max_steps": 10,
    "sample_backend": "hf",
    "max_new_tokens": 128,
}
DATA = "chats:\n  path: data/chats.jsonl\n  source: local\n  converter: sharegpt\n  size: 50\n"


@pytest.fixture
def of_file(converted, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text(DATA)
    (tmp_path / "data/pairs.yaml").write_text("p: {path: a/b, converter: pair, split: train_prefs}\n")
    (tmp_path / "data/own.yaml").write_text("own: {path: a/b}\n")
    (tmp_path / "data/alpaca.yaml").write_text("p: {path: a/b, converter: alpaca}\n")
    return lambda values, **more: converted(FILE | values, **more)


def test_a_file_becomes_a_recipe(of_file):
    result, recipe = of_file({}, num_processes=4)
    assert (result.kit, result.config, recipe.method, recipe.lora_r) == ("LLaMA-Factory v1", "fsdp", "lora", 16)
    assert (recipe.dataset, recipe.dataset_split) == ("data/chats.jsonl", "train[:50]")
    assert (recipe.global_batch_size, recipe.max_length, recipe.max_steps) == (8, 512, 10)
    assert (recipe.lr_scheduler_type, recipe.weight_decay, recipe.gradient_checkpointing) == ("constant", 0.01, True)


def test_quantised_and_full_and_pairs(of_file):
    assert of_file({"quant_config": {"name": "bnb", "quantization_bit": 4}})[1].method == "qlora"
    assert of_file({"peft_config": None})[1].method == "full"
    assert of_file({"train_dataset": "data/pairs.yaml"})[1].objective == "dpo"


def test_an_input_follows_its_instruction_at_once(of_file):
    (entry,) = of_file({"train_dataset": "data/alpaca.yaml"})[1].dataset_entries
    assert question(entry.prompt_format, "Add: ", "2, 2") == "Add: 2, 2"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optim_config": {"name": "muon"}}, "--drop optim_config"),
        ({"train_dataset": "data/nowhere.yaml"}, "not found from here"),
        ({"train_dataset": "data/own.yaml"}, "without a converter"),
        ({"train_dataset": "rows.jsonl"}, "without a converter"),
        ({"model_class": "vlm"}, "causal language models only"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(of_file, given, says):
    with pytest.raises(UserError, match=says):
        of_file(given)
