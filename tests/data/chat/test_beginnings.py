"""Beginnings of a conversation from one rendering are those that the template renders, whatever the template reads."""

from itertools import pairwise

import pytest
from data_helpers import CALL, CHATS, GOLDEN, HEADER, PROMPT, WEATHER, chat, template_of

from kit.data.chat.beginnings import Conversation
from kit.data.chat.shipped import SHIPPED
from kit.data.chat.template import Template, resolve_template
from kit.data.chat.tokens import encode
from kit.errors import UserError

SHAPES = sorted(path.stem for path in GOLDEN.glob("*.txt"))
BODY = HEADER + "{{ m.content }}"
END = "<|im_end|>\n{% endfor %}"
PLAIN = BODY + END + PROMPT
# Templates by what makes their beginnings different from the beginning of their text.
ODD = {
    "the last message": BODY + "{{ '!' if loop.last }}" + END + PROMPT,
    "the next message": BODY + "{{ loop.nextitem.role if loop.nextitem }}" + END + PROMPT,
    "the next message by its index": BODY + "{{ messages[loop.index].role }}" + END + PROMPT,
    "the number of messages": BODY + "{{ messages | length }}" + END + PROMPT,
    "all, as JSON": BODY + "{{ messages | tojson | length }}" + END + PROMPT,
    "all, before the loop": "{{ messages | map(attribute='role') | join }}" + PLAIN,
    "some, before the loop": "{{ messages[2].content if messages[2] is defined }}" + PLAIN,
    "whether there are others": "{{ '+' if messages[1:] }}" + PLAIN,
    "the last, behind the loop": BODY + END + "{{ messages[-1].role }}" + PROMPT,
    "a number counted in the loop": "{% set n = namespace(n=0) %}"
    + BODY
    + "{% set n.n = n.n + 1 %}"
    + END
    + "{{ n.n }}",
    "a macro behind the loop": "{% macro f() %}{{ messages | length }}{% endmacro %}" + BODY + END + "{{ f() }}",
    "another loop": PLAIN + "{% for m in messages %}{{ m.role }}{% endfor %}",
    "a loop that ends early": BODY + "{% if loop.index > 3 %}{% break %}{% endif %}" + END + PROMPT,
    "a loop that is empty": BODY + "<|im_end|>{% else %}nothing{% endfor %}" + PROMPT,
    "a loop with a condition": PLAIN.replace("in messages", "in messages if m.role != 'user'"),
    "a loop inside": "{% if messages %}" + BODY + END + "{% endif %}" + PROMPT,
    "whether a message is among them": BODY + "{{ {'role': 'user', 'content': 'Bye'} in messages }}" + END + PROMPT,
    "a failure": BODY + "{{ raise_exception('no') if loop.index > 4 }}" + END + PROMPT,
}
# Those whose beginnings are known all the same.
EASY = {
    "plain": PLAIN,
    "the first": "{{ messages[0].role }}" + PLAIN,
    "without the first": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}" + PLAIN.replace("in messages", "in rest"),
    "the one before": BODY
    + "{{ loop.previtem.role if loop.previtem }}{{ messages[loop.index0 - 1].role if loop.index0 }}"
    + END
    + PROMPT,
    "a default": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    + PLAIN,
    "a count": "{% set n = namespace(n=0) %}" + BODY + "{% set n.n = n.n + 1 %}{{ n.n }}" + END + PROMPT,
    "a macro": "{% macro f(x) %}{{ x }}{% endmacro %}" + BODY + "{{ f(m.role) }}" + END + PROMPT,
    "left out": PLAIN.replace("{{ m.role", "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role", 1),
    "the flag in the loop": BODY + "{{ '?' if add_generation_prompt }}" + END + PROMPT,
    "another end": BODY + END + "{{ '<|endoftext|>' if not add_generation_prompt else '<|im_start|>assistant' }}",
}
LONG = chat("Hi", "Hello", "Bye", "Bye now", "42?", "42", "Hi", "Hello")["messages"]
CALLED = [
    *LONG[:3],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    LONG[5],
]
CONVERSATIONS = {
    "long": (LONG, None),
    "system": ([{"role": "system", "content": "Be kind"}, *LONG], None),
    "calls": (CALLED, [WEATHER]),
    "reasoning": (CHATS["thoughts"]["messages"], None),
}


def rendered(render, *args):
    try:
        return render(*args)
    except UserError as error:
        return str(error)


def check(source, messages, tools, tokenizer):
    """All beginnings are as the template renders them. Returns how many of them it had to render."""
    template = Template(source, tokenizer)
    conversation = Conversation(template, messages, tools)
    direct, rendered_alone = template.render, []
    for flag in (False, True):
        expected = [rendered(direct, messages[:num], tools, flag) for num in range(1, len(messages) + 1)]
        template.render = lambda *args: rendered_alone.append(len(args[0])) or direct(*args)
        assert [rendered(conversation.render, num, flag) for num in range(1, len(messages) + 1)] == expected
        template.render = direct
    return len(rendered_alone)


@pytest.mark.parametrize("shape", SHAPES)
def test_of_a_template_in_use(shape, tokenizer_with_bos):
    for name, (messages, tools) in CONVERSATIONS.items():
        num_alone = check(template_of(shape, tokenizer_with_bos), messages, tools, tokenizer_with_bos)
        if shape in SHIPPED and name == "long":
            assert num_alone <= 1  # the prompt behind the last answer, which nobody asks for


@pytest.mark.parametrize("read", ODD)
def test_of_a_template_that_reads(read, tokenizer):
    for messages, tools in CONVERSATIONS.values():
        check(ODD[read], messages, tools, tokenizer)


def test_one_rendering_is_enough_for_templates_that_ask_for_nothing_later(tokenizer):
    for name, source in EASY.items():
        assert check(source, LONG, None, tokenizer) == 1, name


@pytest.mark.parametrize("ends", ["", "{{ '!' if loop.last }}"])
def test_marks_are_those_of_each_beginning(ends, tokenizer):
    marked = "{% generation %}{{ m.content }}" + ends + "<|im_end|>{% endgeneration %}"
    template = Template(HEADER + marked + "\n{% endfor %}" + PROMPT, tokenizer)
    conversation = Conversation(template, LONG, None)
    for num in range(1, len(LONG) + 1):
        assert conversation.render_marked(num) == template.render_marked(LONG[:num], None)


def test_the_template_is_not_run_again_for_each_answer_of_a_long_conversation(tokenizer, monkeypatch):
    renderings, render = [], Template.render
    monkeypatch.setattr(Template, "render", lambda *args, **options: renderings.append(1) or render(*args, **options))
    long = chat(*["Hi", "Hello"] * 200)
    [encoded] = encode(long, tokenizer, resolve_template(tokenizer, "chatml"))
    assert sum(a == 0 < b for a, b in pairwise(encoded.weights)) == 200
    assert len(renderings) < 10
