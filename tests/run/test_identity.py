"""Two starts are one run where what a step computes is the same, but for rounding."""

import re

from helpers import ROOT

from kit.config.recipe import IDENTITY, Recipe
from kit.run.identity import changes, differences, identity, rounding
from kit.run.record import versions


def test_the_docs_list_every_setting_on_the_side_that_its_declaration_says():
    """A setting that is added, or that changes sides, needs a second look: at docs/recovery.md."""
    page = (ROOT / "docs/recovery.md").read_text()
    section = page[page.index("## Which settings may change") : page.index("Such a change is refused")]
    free, other = (re.findall(r"`(\w+)`", text) for text in section.split("| makes it another run |"))
    assert sorted(set(other)) == sorted(IDENTITY)
    assert sorted(set(free)) == sorted(set(Recipe.model_fields) - set(IDENTITY))


def test_each_setting_of_the_identity_is_compared(recipe):
    for setting in [name for name in IDENTITY if name not in ("method", "model_name_or_path")]:
        old = getattr(recipe(), setting)
        others = {"lora_target_modules": "q_proj", "dataset_columns": "a=text", "optim": "adamw_8bit"}
        others |= {"freeze": ["a*"], "train_only": ["a*"], "chat_template_kwargs": "a=1", "adapter_options": "a=1"}
        others |= {
            "min_lr_rate": 0.1,
            "learning_rate": 0.5,
            "embedding_learning_rate": 0.5,
            "init_lora_weights": "gaussian",
            "adapter_type": "oft",
            "qat": "int4_weight_only",
            "lr_scheduler_type": "linear",
            "mixing": "tokens",
            "train_on": "last",
            "excess_length_strategy": "drop",
            "objective": "dft",
            "beta": 0.5,
            "dpo_loss": "ipo",
            "label_smoothing": 0.1,
            "label_smoothing_factor": 0.1,
            "simpo_gamma": 0.1,
        }
        new = others.get(setting) or (not old if isinstance(old, bool) else 0.5 if isinstance(old, float) else "77")
        of_old, of_new = (identity(each, "abc", "base") for each in (recipe(), recipe(**{setting: new})))
        (difference,) = differences(of_old, of_new)
        assert difference.startswith(f"{setting}: "), setting


def test_a_run_that_began_before_the_objective_was_a_setting_had_the_default(recipe):
    new = identity(recipe(), "abc", "base")
    old = {key: value for key, value in new.items() if key != "objective"}
    assert "objective" in new and differences(old, new) == []


def test_another_objective_is_reported_with_the_defaults_that_it_changes(recipe):
    old, new = (identity(recipe(objective=name), "abc", "base") for name in ("dpo", "kto"))
    assert differences(old, new) == ["objective: 'dpo' -> 'kto'"]
    changed = differences(identity(recipe(), "abc", "base"), new)
    assert changed == ["objective: 'sft' -> 'kto'", "beta: None -> 0.1", "learning_rate: 0.0002 -> 5e-06"]


def test_a_default_that_is_written_out_is_the_same_run(recipe):
    written = recipe(learning_rate=2e-4, max_length=2048)
    assert differences(identity(recipe(), "abc", "base"), identity(written, "abc", "base")) == []
    dpo, written = recipe(objective="dpo"), recipe(objective="dpo", beta=0.1, learning_rate=5e-6)
    assert differences(identity(dpo, "abc", "base"), identity(written, "abc", "base")) == []


def test_other_data_and_other_weights_are_reported_in_words_and_another_model_once(recipe):
    old = identity(recipe(), "abc", "base")
    assert differences(old, identity(recipe(), "other", "base")) == [
        "the samples that dataset gives are others, or this version of the kit reads them otherwise"
    ]
    assert differences(old, identity(recipe(), "abc", "other")) == ["the weights at model_name_or_path are others"]
    elsewhere = identity(recipe(model_name_or_path="elsewhere"), "abc", "other")
    assert differences(old, elsewhere) == ["model_name_or_path: 'model' -> 'elsewhere'"]


def test_fewer_samples_are_reported_once(recipe):
    fewer = identity(recipe(max_train_samples=5), "other", "base")
    assert differences(identity(recipe(), "abc", "base"), fewer) == ["max_train_samples: None -> 5"]


def test_what_makes_other_roundings_is_reported_and_nothing_else(recipe):
    strategy = {"type": "ddp", "num_processes": 2, "mixed_precision": "bf16", "device": "cpu", "num_threads": 1}
    settings = {"rounding": rounding(recipe())}
    new = {"strategy": strategy | {"num_replicas": 1}, "versions": versions(), **settings}
    assert changes({"strategy": strategy, "versions": versions()}, new) == []  # from before hybrid sharding
    strategy["num_replicas"] = 1
    old = {"strategy": strategy | {"config": "ddp"}, "versions": versions()}
    assert changes(old, {"strategy": strategy | {"config": "mine"}, "versions": versions(), **settings}) == []
    new = {"strategy": strategy | {"mixed_precision": "no"}, "versions": versions() | {"torch": "9", "kit": "9"}}
    (text,) = changes(old | settings, new | {"rounding": rounding(recipe(torch_compile=True, seed=7))})
    assert "torch_compile False -> True;" in text and "seed" not in text
    assert "mixed_precision bf16 -> no" in text and f"torch {versions()['torch']} -> 9" in text and "kit" not in text


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


def test_weights_of_another_commit_are_reported_with_the_revision_that_takes_the_former(recipe):
    old, new = (identity(recipe(), "abc", commit * 40) for commit in "ab")
    (text,) = differences(old, new)
    assert text.endswith(f"commit {'b' * 40}, no longer the one that --model_revision {'a' * 40} takes")
    assert differences(old, identity(recipe(model_revision="a" * 40), "abc", "a" * 40)) == []
