"""A template that would take too much is stopped; all others render as transformers renders them."""

import os
import threading

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from kit.data.chat import sandbox
from kit.data.chat.sandbox import TemplateError, TooMuch, render
from kit.data.chat.shipped import SHIPPED

HARMFUL = {
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "loops": "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4,
}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    monkeypatch.setattr(sandbox, "_num_stopped", sandbox.Counter())


def in_thread(function):
    """What ``function`` raises in a thread other than the main one, in which rows of a stream are rendered."""
    caught = []

    def run():
        try:
            function()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMFUL)
def test_what_would_take_too_much_is_stopped_in_any_thread(name):
    assert isinstance(in_thread(lambda: render(HARMFUL[name], {})), TooMuch)
    assert render("{{ 1 + 1 }}", {}) == "2"


def test_a_fork_stops_templates_too():
    assert render("{{ 1 }}", {}) == "1"
    child = os.fork()
    if child == 0:
        os._exit(isinstance(in_thread(lambda: render(HARMFUL["loops"], {})), TooMuch))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


SAME = [
    "{{ 1 + 2 + 3 }}{{ 'ab' * 3 }}{{ '%s-%d' % ('x', 3) }}{{ a ~ 1 ~ none }}{{ {'k': a, 'l': [a, a]} }}",
    "{{ (a|safe) + '<' + a }}{{ ('<'|e) ~ '<' }}{% autoescape true %}{{ '<' + (a|safe) }}{% endautoescape %}",
    "{% for k, v in {'x': a}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}{{ [{'k': 1}]|groupby('k')|list }}",
    "{{ '{}-{:>5}'.format(a, 1) }}{{ a|indent(2, true) }}{{ {'k': a}|tojson(indent=2) }}{{ 2.345|round(1) }}",
]


@pytest.mark.parametrize("source", [*SAME, *(shipped.source for shipped in SHIPPED.values())])
def test_the_text_is_that_of_transformers(source):
    messages = [{"role": "user", "content": "Hi <x>"}, {"role": "assistant", "content": " Yo "}] * 2
    values = {"a": "x<\nx", "messages": messages, "bos_token": "<s>", "eos_token": "</s>", "tools": None}
    assert render(source, values) == _compile_jinja_template(source).render(values)


def test_a_mistake_has_its_line():
    with pytest.raises(TemplateError) as caught:
        render("a\n{% for %}", {})
    assert caught.value.line == 2
    with pytest.raises(TemplateError, match="no question"):
        render("{{ raise_exception('no question') }}", {})
