"""A key that asks for nothing leaves no trace, and any other ends where it is shown."""

import pytest

from kit.tools.convert.draft import Draft, Group, as_list, is_false, is_nothing, is_true, number, shown


@pytest.mark.parametrize("value", [None, "", " ", "null", "None", "~", [], {}])
def test_an_empty_value_is_nothing(value):
    assert is_nothing(value)
    draft = Draft({"key": value})
    assert draft.take("key", 3) == 3 and not draft.given


@pytest.mark.parametrize("value", [0, False, "no", 0.0])
def test_a_switch_that_is_off_or_a_zero_is_a_value(value):
    assert not is_nothing(value)


def test_switches_are_read_as_yaml_and_as_a_command_line_have_them():
    assert [is_true(word) for word in (True, "true", "1", "no", None)] == [True, True, True, False, False]
    assert [is_false(word) for word in (False, "false", "no", True, None)] == [True, True, True, False, False]


def test_a_key_that_was_renamed_is_left_out_by_the_name_that_the_file_has():
    draft = Draft({}, names={"optim": "optimizer"})
    draft.drop("optim", "lion", Group.LEARNS, "why")
    draft.drop("optim.betas", 1, Group.LEARNS, "why")
    assert [each.key for each in draft.left_out] == ["optimizer", "optimizer.betas"]


def test_what_was_typed_settles_what_is_missing():
    draft = Draft({}, typed={"dataset": "d"})
    draft.refuse("dataset", "x", "not found", "dataset")
    draft.drop("template", "x", Group.LEARNS, "no such text", "dataset")
    assert not draft.problems and not draft.left_out


def test_values_are_lists_and_numbers_as_people_write_them():
    assert as_list("a, b") == ["a", "b"] and as_list(None) == [] and as_list(3) == [3]
    assert number("2e-5") == 2e-5
    with pytest.raises(ValueError, match="None"):
        number(None)


def test_a_long_value_is_shortened():
    assert len(shown("x" * 500)) == 60 and "\n" not in shown("a\nb")
