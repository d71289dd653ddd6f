"""Keys that no module reads are sorted by the answers that their flags have."""

import pytest

from kit.config.other_kits import OTHER_KITS
from kit.config.recipe import Recipe
from kit.tools.convert.draft import Draft, Group
from kit.tools.convert.words import _NEEDLESS, take_rest

GROUPS = {
    "gradient_checkpointing_kwargs": Group.NEEDLESS,
    "wandb_entity": Group.NEEDLESS,
    "dataset_prepared_path": Group.NEEDLESS,
    "hub_model_id": Group.NEEDLESS,
    "use_swanlab": Group.NEEDLESS,
    "eval_use_evalscope": Group.NEEDLESS,
    "liger_rope": Group.SPEED,
    "use_liger": Group.SPEED,
    "load_in_8bit": Group.SPEED,
    "tensor_parallel_size": Group.SPEED,
    "pissa_init": Group.LEARNS,
    "min_sample_len": Group.LEARNS,
    "galore_rank": Group.LEARNS,
    "kd_ratio": Group.LEARNS,
    "nobody_knows_this": Group.LEARNS,
}


@pytest.mark.parametrize("key", GROUPS)
def test_a_word_is_in_the_group_of_what_leaving_it_out_changes(key):
    draft = Draft({key: 7})
    take_rest(draft)
    assert [(each.key, each.group) for each in draft.left_out] == [(key, GROUPS[key])]


@pytest.mark.parametrize("key", [*GROUPS, "use_anything"])
def test_a_switch_that_is_off_asks_for_nothing(key):
    draft = Draft({key: False})
    take_rest(draft)
    assert [each for each in draft.left_out if each.group is Group.LEARNS] == []


def test_a_word_with_the_same_meaning_is_renamed_and_our_own_is_kept():
    draft = Draft({"lora_rank": 4, "seed": 1, "max_seq_length": None})
    take_rest(draft)
    assert draft.values == {"lora_r": 4, "seed": 1} and not draft.left_out


def test_each_beginning_of_an_answer_is_that_of_one():
    answers = set(OTHER_KITS.values())
    other = {"trackio's", "it is wandb's", "not offered: clearml"}  # answers to all words that begin so
    assert [start for start in _NEEDLESS if start not in other and not any(a.startswith(start) for a in answers)] == []


def test_a_mapping_is_never_taken_for_a_value():
    draft = Draft({"added_tokens_overrides": {128: "<x>"}})
    take_rest(draft)
    assert not set(draft.values) & set(Recipe.model_fields) and draft.left_out[0].group is Group.LEARNS


def test_an_upload_with_its_name_is_kept_and_one_without_is_left_out():
    draft = Draft({"push_to_hub": True, "hub_model_id": "lab/mine"})
    take_rest(draft)
    assert draft.values == {"push_to_hub": "lab/mine"} and not draft.left_out
    for given in ({"push_to_hub": True}, {"push_to_hub": True, "hub_model_id": "mine"}):
        draft = Draft(given)
        take_rest(draft)
        assert draft.values == {} and {each.group for each in draft.left_out} == {Group.NEEDLESS}
    draft = Draft({"push_to_hub": False, "hub_model_id": "lab/mine"})
    take_rest(draft)
    assert draft.values == {} and [each.key for each in draft.left_out] == ["hub_model_id"]
