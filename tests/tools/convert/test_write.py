"""The recipe that is written is read again with the same values, whatever they hold."""

import yaml

from kit.tools.convert.draft import Draft, Group
from kit.tools.convert.write import recipe_text


def test_values_with_any_character_survive_and_comments_stay_comments():
    draft = Draft({}, values={"model_name_or_path": "a: b # c", "learning_rate": 2e-05, "packing": True})
    draft.values["dataset"] = [{"path": "x,y\n", "split": "train[:5]"}]
    draft.put("seed", 3, "x" * 200)
    draft.drop("key", "line\nbreak", Group.LEARNS, "why")
    text = recipe_text(draft, ["made of\nmine"])
    assert yaml.safe_load(text) == draft.values | {"learning_rate": "2e-05"}
    assert all(len(line) <= 210 for line in text.splitlines())


def test_a_number_that_was_typed_stands_as_it_was_typed():
    lines = recipe_text(
        Draft({}, values={"max_steps": "3", "packing": "true", "learning_rate": "1e-5"}), []
    ).splitlines()
    assert [line for line in lines if line] == ["packing: true", "max_steps: 3", "learning_rate: 1e-5"]


def test_settings_stand_in_the_order_of_the_help_and_each_group_of_what_was_left_out_has_a_title():
    draft = Draft({}, values={"seed": 1, "model_name_or_path": "m", "dataset": "d"})
    draft.drop("a", 1, Group.SPEED, "why")
    lines = recipe_text(draft, []).splitlines()
    assert [line.split(":")[0] for line in lines if line and line[0] != "#"] == [
        "model_name_or_path",
        "dataset",
        "seed",
    ]
    assert lines[-2:] == ["# Left out: changes only speed or memory.", "#   a: 1  (why)"]
