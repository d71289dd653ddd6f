"""Two starts are one run where what a step computes is the same, but for rounding."""

import re

import pytest
from helpers import ROOT

from kit.config.recipe import IDENTITY, Recipe
from kit.run.identity import changes, differences, identity
from kit.run.record import versions

# What may change between two starts of one run: it does not change what a step computes, but for rounding.
MAY_CHANGE = """
trust_remote_code attn_implementation gradient_checkpointing dataset dataset_split dataset_config dataset_num_proc
eval_dataset_config
per_device_train_batch_size num_train_epochs max_steps
eval_dataset eval_dataset_split eval_split_size max_eval_samples eval_strategy eval_steps eval_on_start
predict_with_generate max_new_tokens early_stopping_patience early_stopping_threshold per_device_eval_batch_size
output_dir overwrite_output_dir save_strategy save_steps save_total_limit resume_from_checkpoint logging_steps
report_to deterministic tf32 sync_each_batch ddp_timeout ddp_bucket_cap_mb keep_best async_save max_nonfinite_steps
loss_spike_ratio on_bad_row check_replicas run_name project save_only_model
""".split()


def test_every_setting_is_either_part_of_a_runs_identity_or_free_to_change():
    """A new setting must be put on one of the two lists."""
    assert sorted(IDENTITY + MAY_CHANGE) == sorted(Recipe.model_fields)


def test_the_docs_say_of_every_setting_whether_it_may_change():
    page = (ROOT / "docs/recovery.md").read_text()
    section = page[page.index("## Which settings may change") : page.index("Such a change is refused")]
    free, other = section.split("| makes it another run |")
    for text, keys in ((free, MAY_CHANGE), (other, IDENTITY)):
        assert sorted(set(re.findall(r"`(\w+)`", text))) == sorted(keys)


@pytest.mark.parametrize("setting", [name for name in IDENTITY if name not in ("method", "model_name_or_path")])
def test_each_setting_of_the_identity_is_looked_at(recipe, setting):
    old = getattr(recipe(), setting)
    others = {"lora_target_modules": "q_proj", "dataset_columns": "a=text", "optim": "adamw_8bit"}
    others |= {"freeze": ["a*"], "train_only": ["a*"], "chat_template_kwargs": "a=1"}
    others |= {
        "min_lr_rate": 0.1,
        "learning_rate": 0.5,
        "lr_scheduler_type": "linear",
        "mixing": "tokens",
        "train_on": "last",
        "excess_length_strategy": "drop",
    }
    new = others.get(setting) or (not old if isinstance(old, bool) else 0.5 if isinstance(old, float) else "77")
    # There is only one objective to choose, so another one would not pass validation.
    changed = recipe().model_copy(update={setting: "77"}) if setting == "objective" else recipe(**{setting: new})
    of_old, of_new = (identity(each, "abc", "base") for each in (recipe(), changed))
    (told,) = differences(of_old, of_new)
    assert told.startswith(f"{setting}: ")


def test_a_run_that_began_before_the_objective_was_a_setting_had_the_default(recipe):
    new = identity(recipe(), "abc", "base")
    old = {key: value for key, value in new.items() if key != "objective"}
    assert "objective" in new and differences(old, new) == []


def test_a_default_that_is_written_out_is_the_same_run(recipe):
    written = recipe(learning_rate=2e-4, max_length=2048)
    assert differences(identity(recipe(), "abc", "base"), identity(written, "abc", "base")) == []


def test_other_data_and_other_weights_are_told_in_words_and_another_model_once(recipe):
    old = identity(recipe(), "abc", "base")
    assert differences(old, identity(recipe(), "other", "base")) == ["the samples that dataset gives are others"]
    assert differences(old, identity(recipe(), "abc", "other")) == ["the weights at model_name_or_path are others"]
    elsewhere = identity(recipe(model_name_or_path="elsewhere"), "abc", "other")
    assert differences(old, elsewhere) == ["model_name_or_path: 'model' -> 'elsewhere'"]


def test_fewer_samples_are_told_once(recipe):
    fewer = identity(recipe(max_train_samples=5), "other", "base")
    assert differences(identity(recipe(), "abc", "base"), fewer) == ["max_train_samples: None -> 5"]


def test_what_makes_other_roundings_is_told_and_nothing_else():
    strategy = {"type": "ddp", "num_processes": 2, "mixed_precision": "bf16", "device": "cpu", "num_threads": 1}
    new = {"strategy": strategy | {"num_replicas": 1}, "versions": versions()}
    assert changes({"strategy": strategy, "versions": versions()}, new) == []  # from before hybrid sharding
    strategy["num_replicas"] = 1
    old = {"strategy": strategy | {"config": "ddp"}, "versions": versions()}
    assert changes(old, {"strategy": strategy | {"config": "mine"}, "versions": versions()}) == []
    new = {"strategy": strategy | {"mixed_precision": "no"}, "versions": versions() | {"torch": "9", "kit": "9"}}
    (told,) = changes(old, new)
    assert "mixed_precision bf16 -> no" in told and f"torch {versions()['torch']} -> 9" in told and "kit" not in told


def test_a_run_that_began_before_a_setting_existed_had_its_default(recipe):
    old = {key: value for key, value in identity(recipe(), "abc", "base").items() if key not in ("shuffle", "dedup")}
    assert differences(old, identity(recipe(), "abc", "base")) == []
    assert differences(old, identity(recipe(shuffle=False), "abc", "base")) == ["shuffle: True -> False"]
    assert differences(old, identity(recipe(dedup=True), "other", "base")) == ["dedup: False -> True"]


def test_to_ignore_a_column_that_was_not_read_is_the_same_run(recipe):
    old = identity(recipe(dataset_columns="q=text"), "abc", "base")
    assert differences(old, identity(recipe(dataset_columns="q=text,images=ignore"), "abc", "base")) == []
    assert (
        differences(identity(recipe(), "abc", "base"), identity(recipe(dataset_columns="text=text"), "abc", "base"))
        == []
    )
