"""JSON is parsed as by Python's own parser, except that no value of a repeated key is dropped."""

import json

import pytest

from kit.data.strict_json import RepeatedKey, decode, parse


@pytest.mark.parametrize(
    "text", ["1", '"a"', "null", "[]", "{}", '{"a": {"a": [{"a": 1}, {"a": 2}]}, "b": {"a": ":"}}']
)
def test_other_values_are_as_python_parses_them(text):
    assert parse(text) == json.loads(text)
    assert decode(f" x{text}, 2", 2) == (json.loads(text), 2 + len(text))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": true}',
        '{"b": 0,"a" :1,"\\u0061":2}',
        '[{}, {"b": [{"a": 1, "a": 2}]}]',
        '{"x": {"a": 1, "a": 2}}',
    ],
)
def test_a_repeated_key_is_named_at_any_depth_and_what_follows_can_be_parsed(text):
    with pytest.raises(RepeatedKey, match="an object has the key 'a' twice"):
        parse(text)
    assert parse('{"a": [1], "b": 2, "a": [1]}') == {"a": [1], "b": 2}  # equal values are the same row either way
    value, end = decode(text + " {}")
    assert isinstance(value, RepeatedKey) and end == len(text)
