"""A template that would take too much is stopped; all others render as transformers renders them."""

import os
import signal
import threading

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from kit.data.chat import sandbox
from kit.data.chat.sandbox import TemplateError, TooMuch, render
from kit.data.chat.shipped import SHIPPED

GROWS = "{% set n = namespace(x=SEED) %}{% for i in range(90) %}{% set n.x = STEP %}{% endfor %}{{ n.x|string|length }}"
# Large in a single step of Python, in small pieces, and without end: in time, in memory or in depth.
HARMFUL = {
    "power": "{{ 10 ** (10**10) }}",
    "nested format": "{{ '{:>{}}'.format(1, 10**10) }}",
    "lists in lists": GROWS.replace("SEED", "[1]").replace("STEP", "[n.x, n.x]"),
    "source": "a" * (sandbox.MAX_SOURCE + 1),
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "loops": "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4,
}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 1)
    monkeypatch.setattr(sandbox, "_num_stopped", sandbox.Counter())
    end()  # what the process was forked with does not change
    yield
    end()


def end():
    while sandbox._workers:
        sandbox._workers.pop().end()


def text(source, messages=(), **values):
    return render(source, list(messages), values, [(len(messages), False, False)])[0]


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
    assert isinstance(in_thread(lambda: text(HARMFUL[name])), TooMuch)
    assert text("{{ 1 + 1 }}") == "2"


def test_a_process_that_was_killed_is_replaced_a_fork_has_its_own_and_both_end_with_those_that_ask():
    assert text("{{ 1 }}") == "1"
    os.kill(sandbox._workers[0].pid, signal.SIGKILL)
    with pytest.raises(TooMuch, match="ends the process"):
        text("{{ 1 }}")
    assert text("{{ 1 }}") == "1"
    own = sandbox._workers[0].pid
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        done = text("{{ 2 }}") == "2"
        os.write(writer, str(sandbox._workers[0].pid * done).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as file:  # to its end, which is there when the process of the fork has ended too
        assert int(file.read()) not in (0, own)
    assert text("{{ 3 }}") == "3" and sandbox._workers[0].pid == own


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
    assert text(source, **values) == _compile_jinja_template(source).render(values)


def test_a_mistake_has_its_line():
    with pytest.raises(TemplateError) as caught:
        text("a\n{% for %}")
    assert caught.value.line == 2
    with pytest.raises(TemplateError, match="no question"):
        text("{{ raise_exception('no question') }}")
