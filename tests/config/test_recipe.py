"""The schema on its own: every setting explained, foreign words answered truthfully, contradictions named."""

import re

import pytest

from kit.config.conflicts import find_conflicts, suggest_batch
from kit.config.fields import expected
from kit.config.other_kits import OTHER_KITS
from kit.config.recipe import Launch, Recipe

REQUIRED = {"model_name_or_path": "m", "dataset": "d"}


def test_every_setting_says_what_it_is_and_what_it_takes():
    for name, info in (Launch.model_fields | Recipe.model_fields).items():
        assert info.description and expected(info), name


def test_the_flags_of_the_contract_exist():
    contract = """
    model_name_or_path dataset eval_dataset output_dir method max_length chat_template global_batch_size
    per_device_train_batch_size max_steps num_train_epochs learning_rate lr_scheduler_type warmup_steps
    weight_decay max_grad_norm lora_r lora_alpha lora_dropout lora_target_modules gradient_checkpointing
    attn_implementation optim seed dataset_columns logging_steps eval_steps save_steps save_total_limit
    resume_from_checkpoint overwrite_output_dir report_to trust_remote_code
    """
    assert set(contract.split()) <= set(Recipe.model_fields)
    assert {"config", "recipe", "num_processes"} <= set(Launch.model_fields)


def test_words_of_other_kits_are_no_settings_here_and_point_at_settings_that_exist():
    settings = set(Recipe.model_fields) | set(Launch.model_fields)
    assert not settings & set(OTHER_KITS)
    for word, answer in OTHER_KITS.items():
        for used in re.findall(r"\buse (?:--)?(\w+)", answer):
            assert used in settings, (word, used)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"global_batch_size": 10, "per_device_train_batch_size": 4}, {"global_batch_size"}),
        ({"eval_dataset": "e", "eval_split_size": 0.1}, {"eval_split_size"}),
        ({"eval_steps": 5}, {"eval_steps"}),
        ({"predict_with_generate": True}, {"predict_with_generate"}),
        ({"method": "full", "adapter_name_or_path": "a"}, {"adapter_name_or_path"}),
        ({"method": "qlora", "use_dora": True}, {"use_dora"}),
        ({"eval_steps": 5, "use_dora": True, "method": "qlora"}, {"eval_steps", "use_dora"}),
        ({"eval_steps": 5, "eval_split_size": 0.1}, set()),
        ({"eval_steps": 5, "eval_dataset": "e"}, set()),
        ({}, set()),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings, named):
    assert {c.fields[0] for c in find_conflicts(Recipe(**REQUIRED, **settings))} == named


def test_the_learning_rate_follows_the_method_unless_it_is_given():
    rates = {m: Recipe(**REQUIRED, method=m).peak_learning_rate for m in ("full", "lora", "qlora")}
    assert rates["full"] < rates["lora"] == rates["qlora"]
    assert Recipe(**REQUIRED, method="full", learning_rate=0.5).peak_learning_rate == 0.5


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize("unit", [1, 3, 8])
def test_a_suggested_batch_size_is_one_that_works(size, unit):
    suggestions = [int(word) for word in suggest_batch(size, unit).split(" or ")]
    assert suggestions and all(n > 0 and n % unit == 0 and abs(n - size) < unit for n in suggestions)


def test_a_recipe_survives_the_journey_through_json():
    recipe = Recipe(**REQUIRED, dataset_columns="q=prompt,a=completion", lora_target_modules="q_proj,v_proj")
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert recipe.dataset_columns == {"q": "prompt", "a": "completion"}
    assert recipe.lora_target_modules == ["q_proj", "v_proj"]
