"""A file of another kit is recognised by its keys, and a recipe of ours with a few of them is not one."""

import pytest

from kit.config.other_files import KITS, kit_of
from kit.config.recipe import ACCELERATE_CONFIGS, RECIPES, Recipe
from kit.config.recipe_file import read_yaml

FILES = {
    "axolotl": {"base_model": "m", "datasets": [], "sequence_len": 1, "micro_batch_size": 1},
    "LLaMA-Factory": {"model_name_or_path": "m", "stage": "sft", "cutoff_len": 1, "template": "qwen", "dataset": "d"},
    "LLaMA-Factory v1": {"model": "m", "model_class": "llm", "train_dataset": "d", "dist_config": {"name": "fsdp2"}},
    "TRL": {"model_name_or_path": "m", "dataset_name": "d", "use_peft": True, "torch_dtype": "auto"},
}


@pytest.mark.parametrize("kit", FILES)
def test_a_file_is_that_of_the_kit_with_its_keys(kit):
    assert kit_of(FILES[kit], Recipe.model_fields, is_sure=True) == kit


@pytest.mark.parametrize("path", sorted([*RECIPES.glob("*.yaml"), *ACCELERATE_CONFIGS.glob("*.yaml")]), ids=str)
def test_no_file_of_this_kit_is_taken_for_one_of_another(path):
    assert kit_of(read_yaml(path)[0], Recipe.model_fields, is_sure=True) == ""


def test_a_slip_into_the_words_of_another_kit_does_not_make_a_recipe_its_file():
    ours = {"model_name_or_path": "m", "dataset": "d", "warmup_ratio": 0.1, "torch_dtype": "auto", "use_peft": True}
    assert kit_of(ours, Recipe.model_fields, is_sure=True) == ""
    assert kit_of({"model_name_or_path": "m", "template": "x", "stage": "sft"}, Recipe.model_fields, is_sure=True) == ""


def test_no_key_of_a_kit_is_a_setting_of_ours_alone():
    for kit, words in KITS.items():
        assert len(set(words.split()) - set(Recipe.model_fields)) >= 5, kit
