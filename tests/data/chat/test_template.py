"""Templates found, rendered as at inference, and refused where they leave something out."""

import pytest
from data_helpers import CALL, GOLDEN, SPECIAL, WEATHER, byte_level_tokenizer, chat, sentencepiece_tokenizer

from kit.data.chat.template import REQUIRED_TOKENS, TEMPLATES, TODAY, Template, resolve_template
from kit.errors import UserError


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer(bos_token="<bos>")


@pytest.fixture(scope="module")
def sentencepiece():
    return sentencepiece_tokenizer("metaspace")


def test_a_template_is_found_by_name_or_file(tmp_path, tokenizer, sentencepiece):
    assert resolve_template(tokenizer, None) is None
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "broken.jinja").write_text("\n{% for %}")
    (tmp_path / "latin1.jinja").write_bytes(b"\xe9")
    assert resolve_template(tokenizer, str(tmp_path / "own.jinja")) == "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match=r"broken.jinja:2: not a Jinja template"):
        resolve_template(tokenizer, str(tmp_path / "broken.jinja"))
    with pytest.raises(UserError, match=r"latin1.jinja: cannot be read .*; expected a UTF-8 text file"):
        resolve_template(tokenizer, str(tmp_path / "latin1.jinja"))
    with pytest.raises(UserError, match="did you mean 'chatml'"):
        resolve_template(tokenizer, "chatlm")
    with pytest.raises(
        UserError, match=r"'chatml' needs <\|im_start\|>, <\|im_end\|>, which the tokenizer would split"
    ):
        resolve_template(sentencepiece, "chatml")
    with pytest.raises(UserError, match=r"--new_tokens '<\|im_start\|>,<\|im_end\|>' adds them"):
        resolve_template(sentencepiece, "chatml")


def test_the_tokenizers_own_template_is_the_default_one_of_several():
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert resolve_template(tokenizer, None) == "{{ 1 }}"
    tokenizer.chat_template = {"rag": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    with pytest.raises(UserError, match=r"chat_template: .*multiple chat templates"):
        resolve_template(tokenizer, None)


@pytest.mark.parametrize("value", ["{{ bos_token }}" * 500, "{% for m in messages %}{% endfor %}"])
def test_a_template_given_inline_belongs_in_a_file(value, tokenizer):
    with pytest.raises(UserError, match=r"the template itself; expected a file.*\n.*put the template in a file"):
        resolve_template(tokenizer, value)


def test_a_template_name_longer_than_any_file_name_is_no_template(tokenizer):
    with pytest.raises(UserError, match=r"no template 'xxxx.*; expected a file, or one of alpaca") as caught:
        resolve_template(tokenizer, "x" * 5000)
    assert len(str(caught.value)) < 300


def test_every_name_has_a_file_and_every_file_a_name():
    assert {path.stem for path in TEMPLATES.iterdir()} == set(REQUIRED_TOKENS)


ALTERNATING = ["alpaca", "gemma", "llama2", "mistral", "vicuna"]


@pytest.mark.parametrize("name", REQUIRED_TOKENS)
def test_named_templates_say_what_they_cannot_express(name, tokenizer):
    template = Template(resolve_template(tokenizer, name), tokenizer)
    hello = {"role": "assistant", "content": "Hello"}
    hi = {"role": "user", "content": "Hi"}
    for messages in ([hello], [{"role": "system", "content": "Be kind"}, hello], []):
        if name in ALTERNATING:
            with pytest.raises(UserError, match=r"must begin with a user message"):
                template.render(messages, None)
        else:
            assert "Hello" in template.render(messages, None) or not messages
    if name in ALTERNATING:
        with pytest.raises(UserError, match="roles must alternate"):
            template.render([hi, hi], None)
    if name not in ("chatml", "llama3"):
        with pytest.raises(UserError, match=r"roles must alternate|no role tool"):
            template.render([hi, {"role": "tool", "content": "4"}], None)


def test_llama3_writes_one_call_a_turn_and_nothing_beside_it(tokenizer):
    template = Template(resolve_template(tokenizer, "llama3"), tokenizer)
    for message in ({"content": "Hi", "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL, CALL]}):
        with pytest.raises(UserError, match="a turn holds a text or a single call"):
            template.render([{"role": "assistant", **message}], None)


def test_chatml_writes_several_calls_and_several_results(tokenizer):
    template = Template(resolve_template(tokenizer, "chatml"), tokenizer)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    message = {"role": "assistant", "content": "Wait", "tool_calls": [CALL, CALL]}
    assert template.render([message], None) == f"<|im_start|>assistant\nWait\n{call}\n{call}<|im_end|>\n"
    results = [{"role": "tool", "content": text} for text in ("4", "5")]
    assert template.render(results, None) == (
        "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
    )
    system = {"role": "system", "content": "Be kind"}
    assert template.render([system], [WEATHER]).startswith("<|im_start|>system\nBe kind\n\nYou may call these")


def test_the_date_is_fixed_and_asking_for_it_is_noticed(tokenizer):
    template = Template("{% macro m() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ m() }}", tokenizer)
    assert not template.date_was_asked
    assert template.render([], None) == "26 Jul 2024" == f"{TODAY:%d %b %Y}"
    assert template.date_was_asked


def marked(template, messages, tokenizer):
    text, blocks = Template(template, tokenizer).render_marked(messages, None)
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


def test_named_templates_have_no_split_literals_and_others_only_what_they_write(tokenizer, sentencepiece):
    assert Template(resolve_template(sentencepiece, "zephyr"), sentencepiece).split_literals == []
    source = "{# <|no|> #}<|a b|>{{ '<|yes|>' }}[INST]<s><|im_end|>[x][OK] <\uff5cAssistant\uff5c>"
    assert Template(source, tokenizer).split_literals == ["<s>", "<|yes|>", "<\uff5cAssistant\uff5c>"]
    assert Template(source, sentencepiece).split_literals == [
        "<|im_end|>",
        "<|yes|>",
        "<\uff5cAssistant\uff5c>",
        "[INST]",
    ]


SHOW = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("source", "extra", "reason"),
    [
        (SHOW, {"tool_calls": [CALL]}, r"messages\[1\]: the template knows no tool_calls"),
        (SHOW, {"reasoning_content": "Hm"}, r"messages\[1\]: the template knows no reasoning_content"),
        (SHOW + "{# tool_calls reasoning_content #}", {"tool_calls": [], "reasoning_content": ""}, None),
        (SHOW + "{{ messages[1].reasoning_content }}", {"reasoning_content": "Hm"}, None),
        (SHOW + "{{ messages[1].thinking }}", {"reasoning_content": "Hm"}, None),
    ],
)
def test_what_a_template_never_looks_at_is_refused(source, extra, reason, tokenizer):
    messages = chat("Hi", "Hello")["messages"]
    messages[1] |= extra
    template = Template(source, tokenizer)
    if reason is None:
        template.check_extras(messages, None)
    else:
        with pytest.raises(UserError, match=reason):
            template.check_extras(messages, None)
    with pytest.raises(UserError, match=r"knows no tools, .*; expected .*: --chat_template chatml \| llama3, which"):
        template.check_extras(messages, [WEATHER])


def test_tools_are_looked_at_by_those_who_only_set_them_too(tokenizer):
    source = "{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{{ tools }}"
    Template(source, tokenizer).check_extras([], [WEATHER])


def check_shown(source, messages, tokenizer, tools=None):
    template = Template(source, tokenizer)
    template.check_shown(template.render(messages, tools), messages, tools)


def test_a_message_that_is_left_out_is_named(tokenizer):
    messages = chat("Hi", "Hello", "Bye", "Bye now", system="Be kind")["messages"]
    check_shown(SHOW, messages, tokenizer)
    check_shown("{% for m in messages[1:] %}{{ m.content }}{% endfor %}{{ messages[0].content }}", messages, tokenizer)
    for source, number in [
        ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}", 0),
        ("{% for m in messages[:-2] %}{{ m.content }}{% endfor %}", 3),
        ("{% for m in messages if m.content != 'Hello' %}{{ m.content }}{% endfor %}", 2),
        ("{{ messages[0].content }}{% for m in messages[:0:-1] %}{{ m.content }}{% endfor %}", 2),
    ]:
        with pytest.raises(UserError, match=rf"messages\[{number}\]: the template leaves its text out, or changes it"):
            check_shown(source, messages, tokenizer)


def test_a_message_that_says_the_same_as_the_one_before_is_missed_too(tokenizer):
    same = chat("Hi", "Hi")["messages"]
    check_shown(SHOW, same, tokenizer)
    with pytest.raises(UserError, match=r"messages\[1\]: the template leaves its text out"):
        check_shown("{{ messages[0].content }}", same, tokenizer)


def test_a_system_message_may_stand_elsewhere(tokenizer):
    messages = [*chat("Hi", "Hello")["messages"], {"role": "system", "content": "Be kind"}]
    check_shown("{{ messages[-1].content }}" + SHOW.replace("messages", "messages[:-1]"), messages, tokenizer)


def test_of_an_answer_in_the_middle_thoughts_may_be_left_out(tokenizer):
    messages = chat("Hi", "<think>A guest</think>\n\nHello", "Bye", "Bye now")["messages"]
    forgetful = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    check_shown(forgetful, messages, tokenizer)


def test_a_tool_result_may_be_put_into_json(tokenizer):
    messages = [{"role": "tool", "content": '{"sky": "blåtiful\n"}'}]
    check_shown(SHOW, messages, tokenizer)
    check_shown("{{ messages[0].content | tojson }}", messages, tokenizer)
    check_shown("{{ messages[0].content | tojson(ensure_ascii=True) }}", messages, tokenizer)
    with pytest.raises(UserError, match=r"messages\[0\]"):
        check_shown("{{ messages[0].content | length }}", messages, tokenizer)


def test_a_tool_that_is_left_out_is_named_though_a_call_names_it(tokenizer):
    messages = [{"role": "assistant", "content": "weather"}]
    check_shown("{{ tools | tojson }}" + SHOW, messages, tokenizer, [WEATHER])
    with pytest.raises(UserError, match="the template leaves out the tool 'weather'"):
        check_shown("{% if tools and false %}{% endif %}" + SHOW, messages, tokenizer, [WEATHER])


def test_an_answer_holds_all_that_is_said_thought_and_called(tokenizer):
    template = Template("", tokenizer)
    answer = {"content": "<think>\nA\n</think>\nB", "reasoning_content": "C", "tool_calls": [CALL, CALL]}
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    template.check_answer(f"C<think>A</think>B{call}{call}", answer, 1)
    for text in (f"C B{call}{call}", f"A B{call}{call}", f"C A{call}{call}", f"C C B{call}{call}"):
        with pytest.raises(UserError, match=r"messages\[1\]: the template leaves part of the answer out"):
            template.check_answer(text, answer, 1)
    for text in (f"C A B{call}", "C A B weather weather"):
        with pytest.raises(UserError, match=r"messages\[1\]: the template leaves out the call of 'weather', or part"):
            template.check_answer(text, answer, 1)


@pytest.mark.slow
def test_every_special_token_of_the_shapes_is_one_to_the_tokenizer(tokenizer):
    assert all(len(tokenizer(token, add_special_tokens=False).input_ids) == 1 for token in SPECIAL)
    for path in GOLDEN.glob("*.jinja"):
        assert Template(path.read_text(), tokenizer).split_literals == []
