"""Two starts are one run if their steps compute the same, except for rounding."""

from kit.run.identity import ROUNDING, changes, differences, identity


def rounding(recipe):
    return recipe.model_dump(mode="json", include=ROUNDING)


def test_another_objective_is_reported_with_the_defaults_that_it_changes(recipe):
    changed = differences(identity(recipe(), "abc", "base"), identity(recipe(objective="kto"), "abc", "base"))
    assert changed == ["objective: 'sft' -> 'kto'", "beta: None -> 0.1", "learning_rate: 0.0002 -> 5e-06"]


def test_a_default_that_is_written_out_is_the_same_run(recipe):
    dpo, written = recipe(objective="dpo"), recipe(objective="dpo", beta=0.1, learning_rate=5e-6)
    assert differences(identity(dpo, "abc", "base"), identity(written, "abc", "base")) == []


def test_other_data_and_other_weights_are_reported_in_words(recipe):
    old = identity(recipe(), "abc", "base")
    assert differences(old, identity(recipe(), "other", "base")) == [
        "the samples of dataset changed, or this version of the kit reads them differently"
    ]
    assert differences(old, identity(recipe(), "abc", "other")) == ["the weights of model_name_or_path changed"]


def test_only_changes_of_rounding_are_reported(recipe):
    strategy = {"type": "ddp", "num_processes": 2, "mixed_precision": "bf16", "config": "ddp"}
    old = {"strategy": strategy, "versions": {"torch": "2.13"}, "rounding": rounding(recipe())}
    assert changes(old, {**old, "strategy": strategy | {"config": "mine"}}) == []
    new = {"strategy": strategy | {"mixed_precision": "no"}, "versions": {"torch": "9"}}
    found = changes(
        old, new | {"rounding": rounding(recipe(torch_compile=True, experts_implementation="eager", seed=7))}
    )
    assert found == [
        "experts_implementation: auto -> eager",
        "torch_compile: auto -> True",
        "mixed_precision: bf16 -> no",
        "torch: 2.13 -> 9",
    ]


def test_to_ignore_a_column_that_was_not_read_is_the_same_run(recipe):
    old, new = (identity(recipe(dataset_columns=columns), "abc", "base") for columns in ("q=text", "q=text,i=ignore"))
    assert differences(old, new) == []


def test_weights_of_another_commit_are_reported_with_the_revision_that_takes_the_former(recipe):
    old, new = (identity(recipe(), "abc", commit * 40, commit * 40) for commit in "ab")
    for key, text in zip(("model", "teacher"), differences(old, new), strict=True):
        assert text.endswith(f"commit {'b' * 40}, not the earlier one, which --{key}_revision {'a' * 40} selects")
    old = identity(recipe(), "abc", "a" * 40)
    assert differences(old, identity(recipe(model_revision="a" * 40), "abc", "a" * 40)) == []
