"""What users of other kits type is answered with what it is called here."""

import re

import pytest
from config_helpers import problems

from kit.config.launch_flags import Launch
from kit.config.other_kits import OTHER_KITS
from kit.config.recipe import Recipe


def test_words_of_other_kits_are_no_settings_here_and_point_at_settings_that_exist():
    settings = set(Recipe.model_fields) | set(Launch.model_fields)
    assert not settings & set(OTHER_KITS)
    for word, answer in OTHER_KITS.items():
        for used in re.findall(r"\buse (?:--)?(\w+)", answer):
            assert used in settings, (word, used)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("gradient_accumulation_steps", "global_batch_size"),
        ("load_in_4bit", "--method qlora"),
        ("bf16", "mixed_precision: bf16"),
        ("max_seq_length", "max_length"),
        ("deepspeed", "--config fsdp"),
        ("tensor_parallel_size", "docs/parallelism.md"),
        ("dp_replicate_size", "--config fsdp_hybrid"),
        ("ddp_find_unused_parameters", "refused by name"),
        ("bucket_cap_mb", "ddp_bucket_cap_mb"),
        ("ddp_comm_hook", "float32"),
    ],
)
def test_words_of_other_kits_are_answered(recipe_file, word, answer):
    assert answer in problems([f"--{word}", "1"])[f"--{word}"]
    assert answer in problems(recipe_file(f"{word}: 1"))[f"mine.yaml:3 {word}"]
