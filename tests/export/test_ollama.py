"""A Modelfile renders conversations as the chat template does, or there is none."""

from types import SimpleNamespace

import pytest
from helpers import ROOT

from kit.data.chat.template import Template
from kit.errors import UserError
from kit.export.ollama import Frame, find_frame, modelfile, stop_tokens

TOKENIZER = SimpleNamespace(special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}" + CHATML
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('no system message') }}{% endif %}{% endfor %}"
)


def frame_of(source):
    return find_frame(Template(source, TOKENIZER))


def test_the_texts_around_messages_are_found():
    frame = frame_of(CHATML)
    assert frame.around["user"] == ("<|im_start|>user\n", "<|im_end|>\n") and frame.prompt == "<|im_start|>assistant\n"
    assert set(frame.around) == {"system", "user", "assistant"}
    assert frame.go() == (
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n"
    )


def test_a_system_message_that_the_template_writes_itself_is_written_only_where_there_is_none():
    frame = frame_of(DEFAULT)
    assert frame.bare_start.startswith("<|im_start|>system\nYou are kind.") and frame.start == ""
    assert frame.go().startswith("{{ if .System }}{{ else }}<|im_start|>system\nYou are kind.")


def test_a_template_without_system_messages_has_no_branch_for_them():
    assert set(frame_of(INST).around) == {"user", "assistant"} and '"system"' not in frame_of(INST).go()


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index }} {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}",
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_does_more_is_refused_with_another_way(source):
    with pytest.raises(UserError, match=r"more than a text before and after each message.*\n.*llama-server --jinja"):
        frame_of(source)


def test_the_tiny_model_has_a_modelfile_that_stops_where_it_learned_to():
    source = (ROOT / "recipes/tiny/model/chat_template.jinja").read_text()
    tokenizer = SimpleNamespace(special_tokens_map={"bos_token": "<|bos|>", "eos_token": "<|end|>"})
    frame = find_frame(Template(source, tokenizer))
    text = modelfile("a.gguf", frame, ["<|end|>"], "Be brief.", "<|bos|>")
    assert text.startswith('FROM ./a.gguf\nTEMPLATE """{{ range .Messages }}') and "<|bos|>" not in text
    assert text.endswith('SYSTEM """Be brief."""\nPARAMETER stop """<|end|>"""\n')
    assert '"""<|bos|>{{ range' in modelfile("a.gguf", frame, [], None, None)  # Ollama writes no BOS by itself


def test_what_cannot_stand_in_a_modelfile_is_refused():
    with pytest.raises(UserError, match="three quotation marks"):
        modelfile("a.gguf", None, [], 'say """hello"""', None)
    with pytest.raises(UserError, match="begins each prompt with <s>"):
        modelfile("a.gguf", Frame("a", "a", {}, ""), [], None, "<s>")


def test_braces_of_a_template_are_text_for_go():
    frame = Frame("", "", {"user": ("{{x}}", "")}, "")
    assert '{{ "{{" }}x}}{{ .Content }}' in frame.go()


def test_a_model_of_plain_text_gets_the_prompt_as_it_is():
    assert 'TEMPLATE """{{ .Prompt }}"""' in modelfile("a.gguf", None, [], None, "<s>")


def test_stops_are_those_of_the_model_and_eos_each_once():
    tokenizer = SimpleNamespace(eos_token_id=2, convert_ids_to_tokens=lambda ids: [f"<{i}>" for i in ids])
    assert stop_tokens(tokenizer, [2, 7]) == ["<2>", "<7>"] and stop_tokens(tokenizer, None) == ["<2>"]
