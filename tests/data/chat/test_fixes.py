"""A fix that a message names works on the conversation that was refused."""

import pytest
from data_helpers import HEADER, SIMPLE, chat

from kit.data.chat.tokens import encode
from kit.errors import UserError

SWITCHED = HEADER + SIMPLE + "{{ '<think>\n' if add_generation_prompt and enable_thinking is not false }}"


def fix_of(sample, tokenizer, template, **options):
    with pytest.raises(UserError) as caught:
        encode(sample, tokenizer, template, **options)
    (problem,) = caught.value.problems
    return problem.fix


def test_a_value_of_the_template_that_works_is_named(tokenizer):
    sample = chat("Hi", "Hello")
    assert fix_of(sample, tokenizer, SWITCHED) == "--chat_template_kwargs enable_thinking=false"
    encode({**sample, "chat_template_kwargs": {"enable_thinking": False}}, tokenizer, SWITCHED)


def test_parameters_of_tools_that_a_template_drops_are_written_as_it_reads_them(tokenizer):
    listed = "{% for t in tools or [] %}{{ t.function.name }}({{ t.function.parameters.properties }}){% endfor %}"
    given = {"city": {"type": "str", "description": "Where"}}
    sample = chat("Hi", "Hello") | {"tools": [{"type": "function", "function": {"name": "add", "parameters": given}}]}
    fix = fix_of(sample, tokenizer, listed + HEADER + SIMPLE)
    assert fix.startswith('write the parameters of tools as JSON schemas: {"type": "object", "properties": {...}}')
    sample["tools"][0]["function"]["parameters"] = {"type": "object", "properties": given}
    encode(sample, tokenizer, listed + HEADER + SIMPLE)


def test_a_thought_in_the_content_of_a_template_with_its_own_form_goes_into_reasoning_content(tokenizer):
    """The tag is that of the row: the template knows none."""
    template = HEADER + "{{ '<|channel|>' + m.reasoning_content + '<|end|>' if m.reasoning_content }}" + SIMPLE
    fix = fix_of(chat("Hi", "<think>A guest</think>Hello"), tokenizer, template)
    assert fix == "write what is between <think> and </think> into reasoning_content"
