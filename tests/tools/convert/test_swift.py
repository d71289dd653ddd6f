"""Files and command lines of ms-swift become recipes that load, or say by key what they cannot."""

import pytest

from kit.errors import UserError

FILE = {
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


def test_a_file_becomes_a_recipe_with_the_defaults_of_that_kit(converted):
    result, recipe = converted(FILE, num_processes=2)
    assert (result.kit, result.config, recipe.method) == ("ms-swift", "fsdp", "lora")
    assert [(entry.path, entry.config, entry.max_samples) for entry in recipe.dataset] == [
        ("a/b", None, 500),
        ("a/c", "main", 20),
        ("mine.jsonl", None, None),
    ]
    assert (recipe.lora_r, recipe.lora_alpha, recipe.lora_dropout) == (8, 32, 0.05)
    assert (recipe.weight_decay, recipe.adam_beta2, recipe.num_train_epochs) == (0.1, 0.95, 3)
    assert (recipe.global_batch_size, recipe.eval_split_size, recipe.eval_steps) == (16, 0.01, 50)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"gradient_accumulation_steps": None}, "global_batch_size", 16),
        ({"tuner_type": "full"}, "method", "full"),
        ({"quant_bits": 4, "quant_method": "bnb"}, "method", "qlora"),
        ({"truncation_strategy": "left"}, "excess_length_strategy", "keep_end"),
        ({}, "excess_length_strategy", "drop"),
        ({"rlhf_type": "kto"}, "objective", "kto"),
        ({"rlhf_type": "simpo"}, "simpo_gamma", 1),
        ({"enable_dft_loss": True}, "objective", "dft"),
        ({"system": "Be brief.\\nBe kind."}, "system_prompt", "Be brief.\nBe kind."),
        ({"loss_scale": "last_round"}, "train_on", "last"),
        ({"lr": 1e-4, "min_lr": 1e-5, "micro_batch_size": 1, "global_batch_size": 8}, "min_lr_rate", 0.1),
    ],
)
def test_a_key_means_what_its_value_says(converted, given, name, value):
    assert getattr(converted(FILE | given)[1], name) == pytest.approx(value)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"system": "prompt.txt"}, "system"),
        ({"streaming": True, "max_steps": 9, "split_dataset_ratio": 0, "dataset": "a/b#5"}, "dataset"),
        ({"tuner_type": "adalora"}, "tuner_type"),
        ({"loss_scale": "react"}, "loss_scale"),
        ({"dataset": ["swift/self-cognition#5", "a/b"]}, "dataset"),
        ({"cached_dataset": "tokens"}, "cached_dataset"),
        ({"cached_val_dataset": "tokens"}, "cached_val_dataset"),
    ],
)
def test_what_changes_what_is_learned_is_refused_by_its_key_until_it_is_dropped(converted, given, key):
    with pytest.raises(UserError, match=f"--drop {key} leaves it out"):
        converted(FILE | given)
    converted(FILE | given, drop=[key])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rlhf_type": "grpo"}, "rewards"),
        ({"dataset": "swift/self-cognition#5"}, "--dataset FILE"),
        ({"dataset": None, "cached_dataset": "tokens"}, "tokenised by ms-swift.*--dataset FILE"),
        ({"new_special_tokens": "tokens.txt"}, "no such file"),
        ({"task_type": "seq_cls"}, "causal language models only"),
        ({"model": "Qwen/Qwen2.5-VL-7B-Instruct"}, "only text"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(converted, given, says):
    with pytest.raises(UserError, match=says):
        converted(FILE | given)


def test_lora_plus_and_swanlab_are_taken_over(converted):
    given = {"optimizer": "lorap", "lorap_lr_ratio": 16, "report_to": "swanlab", "swanlab_project": "p"}
    result, recipe = converted({**FILE, **given, "swanlab_exp_name": "n"})
    assert result.kit == "ms-swift"
    assert (recipe.loraplus_lr_ratio, recipe.report_to, recipe.project) == (16, ["swanlab"], "p")
    assert recipe.run_name == "n"


def test_a_model_of_images_trains_on_data_that_were_named_as_text(converted):
    given = FILE | {"model": "Qwen/Qwen2.5-VL-3B-Instruct"}
    with pytest.raises(UserError, match="--dataset"):
        converted(given)
    assert converted(given, flags={"dataset": "texts.jsonl"})[1].dataset == "texts.jsonl"


def test_code_of_the_file_is_not_left_out_unsaid(converted):
    with pytest.raises(UserError, match="code of other kits is not run"):
        converted(FILE | {"external_plugins": "mine.py"})


def test_the_micro_batch_divides_what_each_process_gets_of_the_global_batch(converted):
    given = FILE | {"micro_batch_size": 16, "global_batch_size": 16, "tensor_model_parallel_size": 4}
    _, recipe = converted(given, num_processes=4)
    assert (recipe.global_batch_size, recipe.per_device_train_batch_size) == (16, 4)
    _, recipe = converted(given, num_processes=4, flags={"per_device_train_batch_size": "2"})
    assert recipe.per_device_train_batch_size == 2


def test_a_script_is_read_like_a_file(converted):
    script = "NPROC_PER_NODE=4 swift sft --model m \\\n  --dataset mine.jsonl --tuner_type lora --lora_rank 4\n"
    result, recipe = converted(script, name="train.sh")
    assert (result.kit, result.config, recipe.lora_r, recipe.dataset) == ("ms-swift", "ddp", 4, "mine.jsonl")


def test_the_program_of_a_script_says_what_trl_trains(converted):
    _, recipe = converted("trl dpo --model_name_or_path m --dataset_name a/b --beta 0.2", name="train.sh")
    assert (recipe.objective, recipe.beta, recipe.learning_rate) == ("dpo", 0.2, 1e-6)


def test_rows_with_placeholders_for_names_are_not_in_the_recipe(converted):
    given = FILE | {"dataset": ["swift/self-cognition:qwen3#5", "a/b"], "model_name": "Rob", "model_author": "me"}
    _, recipe = converted(given, drop=["dataset"])
    assert [entry.path for entry in recipe.dataset_entries] == ["a/b"]
    _, recipe = converted(given | {"dataset": "self-cognition"}, flags={"dataset": "mine.jsonl"})
    assert [entry.path for entry in recipe.dataset_entries] == ["mine.jsonl"]


def test_data_that_are_typed_replace_tokenised_ones(converted):
    given = FILE | {"dataset": None, "cached_dataset": "tokens", "cached_val_dataset": "more", "split_dataset_ratio": 0}
    result, recipe = converted(given, flags={"dataset": "mine.jsonl"})
    assert (recipe.dataset, recipe.has_evaluation) == ("mine.jsonl", False)
    assert {"cached_dataset", "cached_val_dataset"} <= {each.key for each in result.draft.left_out}


def test_names_for_the_placeholders_of_self_cognition_are_put_into_its_rows(converted):
    given = FILE | {"dataset": ["swift/self-cognition#5", "a/b"], "model_name": ["Rob"], "model_author": "me, myself"}
    entry, other = converted(given)[1].dataset
    assert (entry.path, entry.max_samples) == ("modelscope/self-cognition", 5) and other.replace is None
    assert entry.replace == {"{{NAME}}": "Rob", "{{AUTHOR}}": "me, myself"}
    assert entry.columns == {"query": "instruction", "response": "output"}
    # Without one of them, with another name in English rows, or with thoughts before answers, they are not as there.
    subset = ["swift/self-cognition:qwen3#5", "a/b"]
    for more in ({"model_author": None}, {"model_name": ["Rob", "Bob"]}, {"dataset": subset}):
        with pytest.raises(UserError, match="--drop dataset leaves it out"):
            converted(given | more)


def test_each_word_of_a_file_of_tokens_is_a_token(converted, tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("<a>\n<b> <c>\n")
    assert converted(FILE | {"new_special_tokens": [str(file), "<d>"]})[1].new_tokens == ["<a>", "<b>", "<c>", "<d>"]


def test_pretraining_learns_every_token(converted):
    _, recipe = converted("swift pt --model m --dataset a/b --max_steps 5", name="run.sh")
    assert recipe.train_on == "all"
    assert converted("swift sft --model m --dataset a/b --max_steps 5", name="run.sh")[1].train_on == "assistant"
