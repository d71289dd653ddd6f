"""A word in the wrong place is answered by what it means: another flag, the nearest name, a value of another kit."""

from helpers import ROOT

from kit.config.hints import hint_for_file, hint_for_value, hint_for_word, other_kind


def test_a_name_of_a_file_gets_the_nearest_one_of_its_size_or_the_flag_that_takes_it():
    cases = [
        ("lama-8b-lora", "recipe", "did you mean 'llama-8b-lora'?"),
        ("llama-7b-qlora", "recipe", ""),
        ("fsdp", "recipe", "--config fsdp instead of --recipe"),
        ("dpo", "recipe", "--objective dpo instead of --recipe"),
        ("qlora", "config", "--method qlora instead of --config"),
        ("llama-8b-lora.yaml", "config", "--recipe llama-8b-lora instead of --config"),
        ("fsdpp", "config", "did you mean 'fsdp'?"),
    ]
    for name, flag, hint in cases:
        assert hint_for_file(name, flag) == hint, (name, hint)


def test_a_value_that_another_setting_or_another_program_has_is_answered():
    cases = [
        ("method", "dpo", "--objective dpo instead of --method"),
        ("method", "oft", "--method lora --adapter_type oft"),
        ("objective", "qlora", "--method qlora instead of --objective"),
        ("objective", "sigmoid", "use dpo_loss: sigmoid"),
        ("objective", "grpo", "nothing learns from rewards"),
        ("dpo_loss", "orpo", "--objective orpo instead of --dpo_loss"),
        ("attn_implementation", "fa3", "did you mean 'flash_attention_3'?"),
        ("attn_implementation", "flash_attn", "did you mean 'flash_attention_2'?"),
        ("report_to", "wandb,Aim", "metrics.jsonl has each number"),
        ("init_lora_weights", "pissa_niter_16", "docs/models.md#initial-values-that-change-the-base"),
    ]
    for setting, value, hint in cases:
        assert hint in hint_for_value(setting, value), (setting, value, hint)
    for setting, value in (("objective", "dop"), ("optim", "dpo"), ("attn_implementation", "flex"), ("report_to", "x")):
        assert hint_for_value(setting, value) == ""  # a slip, which the spelling answers


def test_a_word_without_a_flag_is_given_its_flag_as_one_word_of_the_shell(tmp_path):
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
        "$(touch it).jsonl": "--dataset '$(touch it).jsonl'",
        "a b.yaml": "--recipe 'a b.yaml'",
        "whatever": "",
    }
    for word, hint in words.items():
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
