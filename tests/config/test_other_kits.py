"""What users of other kits type is answered with what it is called here, and their files are recognised."""

import dataclasses
import re

import pytest
from config_helpers import problems
from helpers import ROOT

from kit.config.other_kits import KITS, hint_for_other_key, kit_of, table_of
from kit.config.paths import ACCELERATE_CONFIGS, RECIPES
from kit.config.recipe import Recipe
from kit.config.recipe_file import read_yaml
from kit.config.validation import FLAGS


def test_answers_point_at_settings_pages_and_headings_that_exist():
    for stem in ("common", *KITS.values()):
        table = table_of(stem)
        for text in {
            str(answer)
            for section in ("needless", "speed", "training", "refused")
            for answer in table[section].values()
        }:
            for used in re.findall(r"\buse (?:--)?(\w+_\w+)", text):
                assert used in FLAGS, text
            for page in re.findall(r"docs/[\w-]+\.md", text):
                assert (ROOT / page).is_file(), text


def test_each_training_argument_of_transformers_is_a_flag_or_is_answered():
    """A new version of transformers that brings a field fails here until the field has an answer."""
    from transformers import TrainingArguments

    names = [field.name for field in dataclasses.fields(TrainingArguments)]
    assert [name for name in names if name not in FLAGS and not hint_for_other_key(name)] == []


# Frequent keys of examples of other kits that are no settings here; some had the answer of a similar name.
FREQUENT = """
    saves_per_epoch wandb_name wandb_log_model wandb_project evals_per_epoch special_tokens lora_model_dir plugins
    lora_target_linear model_type pad_to_sequence_len eval_sample_packing strict liger_rms_norm eot_tokens
    lora_mlp_kernel loss_watchdog_threshold activation_offloading stage do_train plot_loss dataloader_num_workers
    overwrite_cache kernel_config image_max_pixels quant_config debug export_dir quantization_bit pure_bf16
    freeze_vision_tower galore_rank max_epochs dataset_val use_dft_loss num_labels hub_token torch_compile_mode
    train_dataset truncation_strategy teacher_model split_dataset_ratio boft_dropout lora_ga_scale init_weights
    cached_dataset use_pose seq_kd dataset_shuffle moe_aux_loss_coeff early_stop_interval
""".split()


def test_a_known_word_is_never_answered_with_a_guess_by_spelling():
    for word in FREQUENT:
        answer = problems([f"--{word}", "1"])[f"--{word}"]
        assert "-> " in answer and "did you mean" not in answer and "unknown flag" not in answer, word


def test_words_of_other_kits_are_answered_as_a_flag_and_in_a_file_by_their_value(recipe_file):
    cases = [
        ("gradient_accumulation_steps", "8", "global_batch_size"),
        ("load_in_4bit", "true", "use method: qlora"),
        ("bf16", "true", "mixed_precision: bf16"),
        ("mixed_precision", "no", "float32 without it"),
        ("dtype", "float16", "mixed_precision: fp16 in a copy"),
        ("deepspeed", "x.json", "--config fsdp"),
        ("custom_loss", "x", "docs/architecture.md#an-objective-or-another-loss"),
        ("assistant_only_loss", "false", "use train_on: all"),
        ("wandb_project", "", "leave it out"),
        ("rl", "grpo", "reward functions are code"),
        ("loss_type", "aot", "docs/sft-and-preferences.md"),
    ]
    for word, value, answer in cases:
        assert answer in hint_for_other_key(word, value), word
        assert answer in problems(recipe_file(f"{word}: {value}"))[f"mine.yaml:3 {word}"], word
        if value:
            assert answer in problems([f"--{word}", value])[f"--{word}"], word


FILES = {
    "axolotl": {"base_model": "m", "datasets": [], "sequence_len": 1, "micro_batch_size": 1},
    "LLaMA-Factory": {"model_name_or_path": "m", "stage": "sft", "cutoff_len": 1, "template": "qwen", "dataset": "d"},
    "TRL": {"model_name_or_path": "m", "dataset_name": "d", "use_peft": True, "torch_dtype": "auto"},
    "ms-swift": {"model": "m", "tuner_type": "lora", "target_modules": "all-linear", "dataset": "d"},
}


@pytest.mark.parametrize("kit", FILES)
def test_a_file_is_that_of_the_kit_with_its_keys(kit):
    assert kit_of(FILES[kit], Recipe.model_fields, least=3) == kit


def test_no_file_of_this_kit_is_taken_for_one_of_another_also_with_a_few_of_its_words():
    for path in [*RECIPES.glob("*.yaml"), *ACCELERATE_CONFIGS.glob("*.yaml")]:
        assert kit_of(read_yaml(path)[0], Recipe.model_fields, least=3) == ""
    ours = {"model_name_or_path": "m", "dataset": "d", "warmup_ratio": 0.1, "torch_dtype": "auto", "use_peft": True}
    assert kit_of(ours, Recipe.model_fields, least=3) == ""
    assert kit_of({"model_name_or_path": "m", "template": "x", "stage": "sft"}, Recipe.model_fields, least=3) == ""
