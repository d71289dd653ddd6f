"""Expressions are told from names, match as in peft, and are refused if Python cannot read them."""

import pytest
from pydantic import ValidationError

from kit.config import expressions
from kit.config.recipe import Recipe


def test_a_string_with_a_character_that_no_name_has_is_one_expression():
    cases = [
        ("all-linear", "all-linear"),
        ("q_proj, mlp.up_proj", ["q_proj", "mlp.up_proj"]),
        (r".*\.\d{1,2}\.q_proj", [r".*\.\d{1,2}\.q_proj"]),  # its comma does not separate
        (["q_proj", r".*\.mlp\..*"], ["q_proj", r".*\.mlp\..*"]),
    ]
    for value, names in cases:
        assert expressions.module_names(value) == names, (value, names)


@pytest.mark.parametrize("value", [".*(q_proj", ["q_proj", "*"]])
def test_what_cannot_be_matched_is_refused_at_once(value):
    with pytest.raises(ValueError):
        expressions.module_names(value)
    for key in ("lora_target_modules", "lora_modules_to_save"):
        with pytest.raises(ValidationError, match=key):
            Recipe(model_name_or_path="m", dataset="d", **{key: value})


def test_a_name_matches_what_ends_with_it_and_an_expression_the_whole_name():
    name = "model.layers.1.mlp.up_proj"
    assert expressions.matches(name, "up_proj") and not expressions.matches(name, "proj")
    assert expressions.matches(name, r".*up_proj") and not expressions.matches(name, "(up)_proj")
