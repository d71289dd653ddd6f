"""Beginnings of a conversation are rendered as the template does, also where it fails or they are long."""

from itertools import product

from data_helpers import HEADER, PROMPT, chat

from kit.data.chat.conversation import Conversation
from kit.data.chat.template import Template
from kit.system.errors import UserError

PLAIN = HEADER + "{{ m.content }}<|im_end|>{% endfor %}" + PROMPT
FAILS = HEADER + "{{ m.content }}{{ raise_exception('no') if loop.index > 4 }}{% endfor %}"


def rendered(render, *args):
    try:
        return render(*args)
    except UserError as error:
        return str(error)


def test_beginnings_are_as_the_template_renders_them(tokenizer):
    for source, text in ((FAILS, "Hi"), (PLAIN, "long " * 100_000)):
        template, messages = Template(source, tokenizer), chat(*[text, "Hello"] * 3)["messages"]
        conversation = Conversation(template, messages, None)
        for num, flag in product(range(1, 7), (False, True)):
            assert rendered(conversation.render, num, flag) == rendered(template.render, messages[:num], None, flag)
