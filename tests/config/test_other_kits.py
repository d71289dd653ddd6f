"""What users of other kits type is answered with what it is called here."""

import re

import pytest
from config_helpers import problems
from helpers import ROOT

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
        ("fp16", "accelerate launch --mixed_precision no"),
        ("max_seq_length", "max_length"),
        ("deepspeed", "--config fsdp"),
        ("tensor_parallel_size", "docs/parallelism.md"),
        ("tp_size", "docs/parallelism.md"),
        ("sequence_parallel", "docs/parallelism.md"),
        ("zero_stage", "--config fsdp"),
        ("machine_rank", "docs/multi-node.md"),
        ("main_process_ip", "docs/multi-node.md"),
        ("custom_loss", "docs/architecture.md#an-objective-or-another-loss"),
        ("flash_attn", "--attn_implementation"),
        ("device", "--config"),
        ("dp_replicate_size", "--config fsdp_hybrid"),
        ("ddp_find_unused_parameters", "refused by name"),
        ("bucket_cap_mb", "ddp_bucket_cap_mb"),
        ("ddp_comm_hook", "float32"),
    ],
)
def test_words_of_other_kits_are_answered(recipe_file, word, answer):
    assert answer in problems([f"--{word}", "1"])[f"--{word}"]
    assert answer in problems(recipe_file(f"{word}: 1"))[f"mine.yaml:3 {word}"]


def test_answers_point_at_pages_and_headings_that_exist():
    for word, answer in OTHER_KITS.items():
        for page, anchor in re.findall(r"(docs/[\w-]+\.md)(?:#([\w-]+))?", answer):
            headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, (word, anchor)
