"""A word in the wrong place is answered by what it means: another flag, the nearest size, the same method."""

import pytest
from helpers import ROOT

from kit.config.hints import hint_for_file, hint_for_value, hint_for_word, other_kind


def test_a_recipe_is_guessed_by_size_and_method():
    cases = [
        ("llama-7b-qlora", "did you mean 'llama-8b-qlora'?"),
        ("8b", "did you mean one of llama-8b-full, llama-8b-lora, llama-8b-qlora?"),
        ("Llama-3.1-8B", "did you mean one of llama-8b-full, llama-8b-lora, llama-8b-qlora?"),
        ("qwen_72b_lora.yaml", "did you mean 'llama-70b-lora'?"),
        ("llama-0.5b-full", "did you mean 'smollm2-360m-full'?"),
        ("smol-100m-lora", "did you mean 'smollm2-135m-lora'?"),
        ("lama-8b-lora", "did you mean 'llama-8b-lora'?"),
        (
            "qlora",
            "did you mean one of llama-1b-qlora, llama-3b-qlora, llama-70b-qlora, llama-8b-qlora, "
            "qwen3-14b-qlora, qwen3-32b-qlora?",
        ),
        ("fsdp", "--config fsdp instead of --recipe"),
        ("tinny", "did you mean 'tiny'?"),
        ("dpo", "--objective dpo instead of --recipe"),
        ("llama-8b-dpo", "--recipe llama-8b --objective dpo"),
        ("llama-8b-lora-orpo", "--recipe llama-8b-lora --objective orpo"),
        ("llama-7b-lora-dpo", "did you mean 'llama-8b-lora'?"),
        ("nothing/of/mine.yaml", ""),
    ]
    for name, hint in cases:
        assert hint_for_file(name, "recipe") == hint, (name, hint)


def test_a_name_that_is_something_else_gets_the_flag_that_takes_it():
    cases = [
        ("qlora", "--method qlora instead of --config"),
        ("tiny", "--recipe tiny instead of --config"),
        ("kto", "--objective kto instead of --config"),
        ("llama-8b-lora.yaml", "--recipe llama-8b-lora instead of --config"),
        ("fsdpp", "did you mean 'fsdp'?"),
    ]
    for name, hint in cases:
        assert hint_for_file(name, "config") == hint, (name, hint)


def test_a_value_of_another_setting_gets_the_flag_that_takes_it():
    cases = [
        ("method", "dpo", "--objective dpo instead of --method"),
        ("objective", "qlora", "--method qlora instead of --objective"),
        ("dpo_loss", "orpo", "--objective orpo instead of --dpo_loss"),
        ("objective", "sigmoid", "use objective: dpo, with dpo_loss: sigmoid"),
        ("objective", "dop", ""),  # a slip, which the spelling answers
        ("optim", "dpo", ""),
        ("attn_implementation", "fa3", "did you mean 'flash_attention_3'?"),
        ("attn_implementation", "flash_attn", "did you mean 'flash_attention_2'?"),
        ("attn_implementation", "flex", ""),
        ("report_to", "azure_ml", ""),
    ]
    for setting, value, hint in cases:
        assert hint_for_value(setting, value) == hint, (setting, value, hint)


@pytest.mark.parametrize("value", ["clearml", "wandb,Aim", "dvclive"])
def test_a_tracker_that_is_not_offered_says_why(value):
    assert "another id when it is continued" in hint_for_value("report_to", value)


def test_a_word_is_given_its_flag(tmp_path):
    config = tmp_path / "mine.yaml"
    assert hint_for_word(str(config)) == f"--recipe {config}"
    config.write_text("# of mine\nmixed_precision: bf16\n")
    assert hint_for_word(str(config)) == f"--config {config}"
    words = {
        "tiny": "--recipe tiny",
        "fsdp": "--config fsdp",
        "lora": "--method lora",
        "simpo": "--objective simpo",
        "a/b.jsonl": "--dataset a/b.jsonl",
    }
    for word, hint in (words | {"whatever": ""}).items():
        assert hint_for_word(word) == hint


def test_recipes_and_configs_are_not_taken_for_each_other():
    recipe, config = ROOT / "recipes/tiny.yaml", ROOT / "accelerate_configs/fsdp.yaml"
    problem = other_kind({"dataset": "d"}, "config", recipe)
    assert str(problem).startswith(f"--config: {recipe} is a recipe; expected an Accelerate config\n")
    assert problem.fix == f"--recipe {recipe} instead of --config"
    assert f"--config {config}" in str(other_kind({"fsdp_config": {}}, "recipe", config))
    assert other_kind({"dataset": "d"}, "recipe", recipe) is None
    assert other_kind({"mixed_precision": "no"}, "config", config) is None


def test_a_name_in_a_command_is_one_word_of_the_shell(tmp_path):
    config = tmp_path / "a; touch it.yaml"
    assert hint_for_word("$(touch it).jsonl") == "--dataset '$(touch it).jsonl'"
    assert hint_for_word("a b.yaml") == "--recipe 'a b.yaml'"
    assert other_kind({"fsdp_config": {}}, "recipe", config).fix == f"--config '{config}' instead of --recipe"
    assert hint_for_word("a-b/c_d.1.jsonl") == "--dataset a-b/c_d.1.jsonl"


def test_what_peft_has_and_this_kit_does_not_is_refused_with_the_reason():
    cases = [
        ("init_lora_weights", "pissa_niter_16", "docs/models.md#initial-values-that-change-the-base"),
        ("init_lora_weights", "eva", "needs passes over data"),
        ("init_lora_weights", "loftq", "CUDA"),
        ("method", "oft", "--method lora --adapter_type oft"),
    ]
    for name, value, hint in cases:
        assert hint in hint_for_value(name, value), (name, value, hint)
