"""A setting says of itself what it takes, and reads what a user writes as such."""

import pytest

from kit.config.launch_flags import Launch
from kit.config.recipe import Recipe
from kit.schema.fields import (
    column_mapping,
    comma_separated,
    expected,
    template_kwargs,
    token_list,
)


def test_every_setting_says_what_it_is_and_what_it_takes():
    for name, info in (Launch.model_fields | Recipe.model_fields).items():
        assert info.description and expected(info), name


def test_lists_and_columns_are_written_with_commas():
    assert comma_separated(" a, b ,,") == ["a", "b"] and comma_separated(["a,b"]) == ["a,b"]
    assert column_mapping("q = prompt, a=completion") == {"q": "prompt", "a": "completion"}
    for mistake in ("q", "q=a,q=b"):
        assert column_mapping(mistake) == mistake  # refused as text, where a mapping is expected


def test_values_for_a_template_are_json_or_string():
    assert template_kwargs("a=false, b=high,c=x=y") == {"a": False, "b": "high", "c": "x=y"}
    assert template_kwargs('{"a": "3", "b": [1]}') == {"a": "3", "b": [1]}
    assert template_kwargs({"a": "3", "b": False}) == {"a": "3", "b": False}  # a record of a run keeps its types
    assert template_kwargs("a=False,b=True") == {"a": False, "b": True}  # the text "False" is true in a template
    for mistake in ("a=None", "a=NaN", '{"a": [1e999]}', "a=\udcff"):
        assert template_kwargs(mistake) == mistake
    for mistake in ("a", "a=1,b", "a=1,a=2", "a b=1", '{"a": null}', "{a: 1}", "[1]", 3):
        assert template_kwargs(mistake) == str(mistake)  # refused as text, where a mapping is expected


def test_tokens_come_from_a_list_a_text_or_a_file(tmp_path):
    (tmp_path / "tokens.txt").write_text("<a>\n\n<b,c>\n")
    assert token_list(str(tmp_path / "tokens.txt")) == ["<a>", "<b,c>"]
    assert token_list("<a>, </b>,c.d") == ["<a>", "</b>", "c.d"] and token_list(["<b,c>"]) == ["<b,c>"]
    for absent in ("token.txt", str(tmp_path / "token.json")):  # a mistyped file is no token
        with pytest.raises(ValueError):
            token_list(absent)
