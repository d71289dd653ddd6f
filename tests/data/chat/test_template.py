"""Templates found, rendered as at inference, and refused where they leave something out."""

import pytest
from data_helpers import USER, byte_level_tokenizer, chat

from kit.data.chat.conversation import Conversation
from kit.data.chat.template import TODAY, Template, resolve_template
from kit.system.errors import UserError


def test_a_template_is_found_by_name_or_file(tmp_path, tokenizer, sentencepiece):
    assert resolve_template(tokenizer, None) is None
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "broken.jinja").write_text("\n{% for %}")
    assert resolve_template(tokenizer, str(tmp_path / "own.jinja")) == "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match=r"broken.jinja:2: not a Jinja template"):
        resolve_template(tokenizer, str(tmp_path / "broken.jinja"))
    with pytest.raises(UserError, match="did you mean 'chatml'"):
        resolve_template(tokenizer, "chatlm")
    with pytest.raises(
        UserError, match=r"'chatml' needs <\|im_start\|>, <\|im_end\|>, which the tokenizer would split"
    ):
        resolve_template(sentencepiece, "chatml")


def test_several_templates_are_kept_if_one_is_the_default():
    tokenizer = byte_level_tokenizer()
    for several in ({"default": "{{ 1 }}"}, {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}):
        tokenizer.chat_template = several
        assert resolve_template(tokenizer, None) == (several if len(several) > 1 else "{{ 1 }}")
    tokenizer.chat_template = {"rag": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    with pytest.raises(UserError, match=r"chat_template: .*multiple chat templates"):
        resolve_template(tokenizer, None)


# Values for variables of a template

SWITCH = "{% macro m() %}{{ mode }}{% endmacro %}\n{{ enable_thinking is not defined or enable_thinking }} {{ m() }}"


@pytest.mark.parametrize("value", [False, 0.5, "é\"'\\ %} {{ \n", {"a": {"b": [True]}}])
def test_kwargs_become_defaults_of_the_template_itself(value, tokenizer, tmp_path):
    (tmp_path / "own.jinja").write_text(SWITCH)
    name, kwargs = str(tmp_path / "own.jinja"), {"enable_thinking": value, "mode": value}
    source = resolve_template(tokenizer, name, kwargs)
    expected = tokenizer.apply_chat_template([USER], chat_template=SWITCH, tokenize=False, **kwargs)
    assert tokenizer.apply_chat_template([USER], chat_template=source, tokenize=False) == expected
    assert Template(SWITCH, tokenizer).with_values(kwargs).render([USER], None) == expected
    # whoever serves the model may still choose
    other = tokenizer.apply_chat_template([USER], chat_template=source, tokenize=False, mode="x")
    assert other == expected.replace(f" {value}", " x", 1) if str(value) in expected else other.endswith(" x")
    assert resolve_template(tokenizer, name, {}) == SWITCH


def test_kwargs_that_a_template_never_reads_are_refused(tokenizer, tmp_path):
    (tmp_path / "own.jinja").write_text(SWITCH + "{{ messages }}{{ range(2) }}")
    with pytest.raises(
        UserError,
        match=r"chat_template_kwargs: the chat template does not use 'modes'; expected "
        r"one of enable_thinking, mode\n.*did you mean 'mode'",
    ):
        resolve_template(tokenizer, str(tmp_path / "own.jinja"), {"modes": 1})
    with pytest.raises(UserError, match="does not use 'messages'"):
        resolve_template(tokenizer, str(tmp_path / "own.jinja"), {"messages": []})
    with pytest.raises(UserError, match="chat_template_kwargs: there is no chat template"):
        resolve_template(byte_level_tokenizer(), None, {"mode": 1})


def test_the_date_is_fixed_and_asking_for_it_is_noticed(tokenizer):
    template = Template("{% macro m() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ m() }}", tokenizer)
    assert template.render([], None) == "26 Jul 2024" == f"{TODAY:%d %b %Y}"
    assert template.writes_date("26 Jul 2024") and not template.writes_date("Hi")


def marked(template, messages, tokenizer):
    text, blocks = Conversation(Template(template, tokenizer), messages, None).render_marked(len(messages))
    for start, end in reversed(blocks):
        text = f"{text[:start]}[[{text[start:end]}]]{text[end:]}"
    return text


def test_generation_blocks_are_found_wherever_they_end_up(tokenizer):
    messages = chat("Hi", "Hello", "Bye", "42")["messages"]
    block = "{% generation %}{{ m.content }}{% endgeneration %}."
    loop = (
        "{% for m in messages %}|{% if loop.index0 % 2 %}" + block + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    expected = "|Hi|[[Hello]].|Bye|[[42]]."
    assert marked(loop, messages, tokenizer) == expected
    # transformers looks for it at the start of what the macro gives, and of what is set
    assert marked("{% macro all() %}" + loop + "{% endmacro %}{{ all() }}", messages, tokenizer) == expected
    assert marked("{% set all %}" + loop + "{% endset %}{{ all | trim }}", messages, tokenizer) == expected
    assert marked("Hi", messages, tokenizer) == "Hi"
    for odd in ("{{ all | upper | replace('H', '') | length }}", "{{ all | reverse }}"):
        with pytest.raises(UserError, match=r"\{% generation %\} blocks cannot be found"):
            marked("{% set all %}" + loop + "{% endset %}" + odd, messages, tokenizer)


PARTS = "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}|{% endfor %}"


def test_a_template_that_shows_parts_only_is_given_the_text_as_a_part(tokenizer):
    messages = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Yes"}]
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    rendered = Template(PARTS, tokenizer).render(messages, None)
    assert rendered == "user: Hi there|assistant: Yes|"
    assert rendered == tokenizer.apply_chat_template(parts, chat_template=PARTS, tokenize=False)
    either = "{% for m in messages %}{{ m.content if m.content is string else 'parts' }}{% endfor %}"
    assert Template(either, tokenizer).render(messages, None) == "Hi thereYes"
