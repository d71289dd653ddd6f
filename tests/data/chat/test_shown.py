"""What a template leaves out of a conversation is noticed."""

import pytest
from data_helpers import CALL, HEADER, PROMPT, WEATHER, chat, encode, template_of, with_keys

from kit.data.chat.shown import WITH_REASONING, check_answer, check_shown
from kit.data.chat.template import Template
from kit.system.errors import UserError

SHOW = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def shown(source, messages, tokenizer, tools=None):
    template = Template(source, tokenizer)
    check_shown(template, template.render(messages, tools), messages, tools)


ASKED = [{"role": "user", "content": "Cold?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
ANSWERED = [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "Yes", "reasoning_content": "Low"}]


def test_a_call_in_the_context_must_be_there(tokenizer):
    """Also if it is the same as a later one."""
    calling = SHOW.replace("\n", "{{ m.tool_calls | tojson if m.tool_calls }}\n")
    shown(calling, [*ASKED, *ANSWERED] * 2, tokenizer)
    for template, found in [
        (SHOW + "{# tool_calls #}", r"messages\[1\]: the template leaves out the call of 'weather'"),
        (calling.replace("if m.tool_calls", "if m.tool_calls and loop.index > 4"), "leaves out a call before it"),
        (calling.replace("if m.tool_calls", "if m.tool_calls and loop.index < 4"), r"messages\[5\]: .* the call of"),
    ]:
        with pytest.raises(UserError, match=found):
            shown(template, [*ASKED, *ANSWERED] * 2, tokenizer)


def test_values_in_the_arguments_of_a_call_must_be_there(tokenizer):
    """Names, strings, numbers and what lies deeper, in any form that templates write them."""
    arguments = {"city": 'say "Å"', "days": 4, "ok": True, "none": None, "more": [{"deep": "x'y"}]}
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = {"content": "", "tool_calls": [call]}
    texts = ["""{"city": "say \\"Å\\"", "days": 4, "ok": true, "none": null, "more": [{"deep": "x'y"}]}"""]
    texts += [texts[0].replace("Å", "\\u00c5"), """city=say "Å"<days>4<ok>True<none><more>[{'deep': "x'y"}]"""]
    for text in texts:
        check_answer(Template("", tokenizer), "weather " + text, answer, 1)
        for part in ("city", "days", "4", "rue", "deep", "y"):
            with pytest.raises(UserError, match="leaves out the call of 'weather', or part of it"):
                check_answer(Template("", tokenizer), "weather " + text.replace(part, ""), answer, 1)


def test_a_tool_that_is_left_out_is_named_though_a_call_names_it(tokenizer):
    messages = [{"role": "assistant", "content": "weather"}]
    shown("{{ tools | tojson }}" + SHOW, messages, tokenizer, [WEATHER])
    with pytest.raises(UserError, match="the template leaves out the tool 'weather'"):
        shown("{% if tools and false %}{% endif %}" + SHOW, messages, tokenizer, [WEATHER])


def test_an_answer_has_its_content_reasoning_and_calls(tokenizer):
    template = Template("", tokenizer)
    answer = {"content": "<think>\nA\n</think>\nB", "reasoning_content": "C", "tool_calls": [CALL, CALL]}
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    check_answer(template, f"C<think>A</think>B{call}{call}", answer, 1)
    for text in (f"C B{call}{call}", f"A B{call}{call}", f"C A{call}{call}", f"C C B{call}{call}"):
        with pytest.raises(
            UserError, match=r"messages\[1\]: the template leaves (part|the reasoning) of the answer out"
        ):
            check_answer(template, text, answer, 1)
    for text in (f"C A B{call}", "C A B weather weather"):
        with pytest.raises(UserError, match=r"messages\[1\]: the template leaves out the call of 'weather', or part"):
            check_answer(template, text, answer, 1)


TAKES_OUT = HEADER + "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n{% endfor %}" + PROMPT


@pytest.mark.parametrize(
    ("shape", "train_on", "message"),
    [
        ("chatml", "assistant", {"reasoning_content": "Low"}),
        (TAKES_OUT, "assistant", {"content": "<think>\nLow\n</think>\n\nYes"}),
        ("qwen3", "all", {"reasoning_content": "Low"}),
    ],
)
def test_what_to_do_about_reasoning_that_is_left_out_helps(shape, train_on, message, tokenizer):
    """Reasoning in the content is not advised: some templates take it out, or write no text with a call."""
    sample = with_keys(chat("Cold?", "Yes", "Really?", "Yes"), assistant_0=message)
    template = shape if shape == TAKES_OUT else template_of(shape, tokenizer)
    with pytest.raises(UserError) as caught:
        encode(sample, tokenizer, template, train_on)
    assert caught.value.problems[0].fix == WITH_REASONING


NAMES = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
PROPERTIES = (
    NAMES + "{% for t in tools or [] %}{{ (t.function.parameters.properties or {}).keys() | list }}{% endfor %}"
)


def test_the_parameters_of_a_tool_must_be_in_the_text(tokenizer):
    messages = chat("Hi", "Hello")["messages"]
    as_schema = {"type": "object", "properties": {"plâce": {"type": "string"}}}
    bare = {"plâce": {"type": "str"}}  # gpt-oss and Gemma 4 would drop them
    for source, parameters, is_shown in (
        ("{{ tools | tojson }}", bare, True),
        (PROPERTIES, as_schema, True),
        (PROPERTIES, bare, False),
        (NAMES, as_schema, False),
        (NAMES, None, True),
    ):
        tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        if is_shown:
            shown(source + SHOW, messages, tokenizer, tools)
        else:
            with pytest.raises(UserError, match=r"the template leaves out the parameter '.*' of the tool 'weather'"):
                shown(source + SHOW, messages, tokenizer, tools)
