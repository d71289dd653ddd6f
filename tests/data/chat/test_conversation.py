"""Beginnings of a conversation are rendered as the template does, also where it fails or they are long."""

from data_helpers import HEADER, PROMPT, chat

from kit.data.chat.conversation import Conversation
from kit.data.chat.template import Template
from kit.errors import UserError

PLAIN = HEADER + "{{ m.content }}<|im_end|>{% endfor %}" + PROMPT
MARKED = HEADER + "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% endfor %}"
FAILS = HEADER + "{{ m.content }}{{ raise_exception('no') if loop.index > 4 }}{% endfor %}"


def rendered(render, *args):
    try:
        return render(*args)
    except UserError as error:
        return str(error)


def test_beginnings_are_as_the_template_renders_them(tokenizer):
    for source, text in ((PLAIN, "Hi"), (MARKED, "Hi"), (FAILS, "Hi"), (PLAIN, "long " * 100_000)):
        template = Template(source, tokenizer)
        messages = chat(*[text, "Hello"] * 3)["messages"]
        conversation = Conversation(template, messages, None, [1, 3, 5])
        for num in range(1, 7):
            for flag in (False, True):
                expected = rendered(template.render, messages[:num], None, flag)
                assert rendered(conversation.render, num, flag) == expected
            if source == MARKED:
                text, spans = conversation.render_marked(num)
                assert [text[start:end] for start, end in spans] == [
                    f"{m['content']}<|im_end|>" for m in messages[:num]
                ]
