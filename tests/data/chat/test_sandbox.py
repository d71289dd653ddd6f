"""A template that would take too much is stopped; all others render as transformers renders them."""

import json
import os
import signal
import subprocess
import sys
import threading

import jinja2
import pytest
from helpers import ROOT
from transformers.utils.chat_template_utils import _compile_jinja_template

from kit.data.chat import sandbox
from kit.data.chat.sandbox import TooMuch, compile_template, render
from kit.data.chat.shipped import SHIPPED

GROWS = "{% set n = namespace(x=SEED) %}{% for i in range(90) %}{% set n.x = STEP %}{% endfor %}{{ n.x|string|length }}"
LARGE = {
    "product": "{{ 'a' * 10**10 }}",
    "product of a list": "{{ [1] * 10**10 }}",
    "power": "{{ 10 ** (10**10) }}",
    "width": "{{ '%10000000000d' % 1 }}",
    "width as an argument": "{{ '%*d' % (10**10, 1) }}",
    "filter format": "{{ '%10000000000d'|format(1) }}",
    "method format": "{{ '{:>10000000000}'.format(1) }}",
    "nested format": "{{ '{:>{}}'.format(1, 10**10) }}",
    "filter center": "{{ 'a'|center(10**10) }}",
    "method center": "{{ 'a'.center(10**10) }}",
    "method by name": "{{ ('a'|attr('ljust'))(10**10) }}",
    "method by item": "{{ 'a'['zfill'](10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "indent": "{{ 'a'|indent(10**10, true) }}",
    "indent of JSON": "{{ [1]|tojson(indent=10**10) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "replace": "{{ ('a' * 10000)|replace('a', 'b' * 10000) }}",
    "method replace": "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
    "join": "{{ range(10000)|list|join('b' * 10000) }}",
    "method join": "{{ ('b' * 10000).join('a' * 10000) }}",
    "sum of strings": GROWS.replace("SEED", "'ab'").replace("STEP", "n.x + n.x"),
    "sum of lists": GROWS.replace("SEED", "[1]").replace("STEP", "n.x + n.x"),
    "concatenation": GROWS.replace("SEED", "'ab'").replace("STEP", "n.x ~ n.x"),
    "lists in lists": GROWS.replace("SEED", "[1]").replace("STEP", "[n.x, n.x]"),
    "tuples in tuples": GROWS.replace("SEED", "(1, 2)").replace("STEP", "(n.x, n.x)"),
    "dicts in dicts": GROWS.replace("SEED", "{'a': 1}").replace("STEP", "{'a': n.x, 'b': n.x}"),
    "dict": GROWS.replace("SEED", "{'a': 1}").replace("STEP", "dict(a=n.x, b=n.x)"),
    "batches of lists": GROWS.replace("SEED", "[1]").replace("STEP", "(n.x + n.x)|batch(2)|list"),
    "markup": GROWS.replace("SEED", "'ab'|safe").replace("STEP", "n.x + n.x"),
    "source": "a" * (sandbox.MAX_SOURCE + 1),
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
}
LONG = {
    "loops": "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
MUCH = "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + ['a' * 9000000 ~ i] %}{% endfor %}"
TRY = """
import json, resource, sys
from kit.data.chat import sandbox
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
for name, source in json.load(sys.stdin).items():
    try:
        sandbox.render(sandbox.compile_template(source), {})
        print(name, "was rendered")
    except sandbox.TooMuch:
        pass
    except Exception as error:
        print(name, repr(error)[:200])
"""


@pytest.mark.slow
def test_nothing_large_is_made():
    """In a process with a deadline and a limit of memory: a mistake here would fill the memory of the machine."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TRY]
    done = subprocess.run(command, input=json.dumps(LARGE), env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 0.2)
    monkeypatch.setattr(sandbox._Watch, "num_stopped", sandbox.Counter())


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_what_would_not_end_is_stopped(name, hasty):
    with pytest.raises(TooMuch, match="more than 0 seconds"):
        render(compile_template(LONG[name]), {})
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


@pytest.mark.slow
def test_after_a_few_times_it_is_not_tried_again(hasty):
    template = compile_template(LONG["loops"])
    for _ in range(sandbox.MAX_STOPPED):
        with pytest.raises(TooMuch, match="more than 0 seconds"):
            render(template, {})
    with pytest.raises(TooMuch, match="stopped 3 times before"):
        render(template, {})


@pytest.mark.slow
def test_what_fills_the_memory_in_small_pieces_is_stopped(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_BYTES", 1 << 27)
    with pytest.raises(TooMuch, match="memory"):
        render(compile_template(MUCH), {})


def test_no_signal_comes_after_the_last_rendering():
    with sandbox.watched():
        render(compile_template("{{ 1 }}"), {})
        assert signal.getitimer(signal.ITIMER_PROF) != (0, 0)
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_other_threads_render_too():
    texts = []
    thread = threading.Thread(target=lambda: texts.append(render(compile_template("{{ 1 + 1 }}"), {})))
    thread.start()
    thread.join()
    assert texts == ["2"]


SAME = [
    "{{ 1 + 2 + 3 }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 'ab' * 3 }}{{ '%s-%d' % ('x', 3) }}{{ 1.5 + 1 }}",
    "{{ a + 'b' + a }}{{ a ~ 1 ~ none }}{{ [1] + [2, a] }}{{ (1, a) }}{{ {'k': a, 'l': [a, a]} }}",
    "{{ (a|safe) + '<' + a }}{{ ('<'|e) ~ '<' }}",
    "{% autoescape true %}{{ '<' ~ a }}{{ '<' + (a|safe) }}{% endautoescape %}",
    "{% for k, v in {'x': a}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}{% set x, y = a, 1 %}{{ x }}{{ y }}",
    "{{ a.replace('x', 'yy').center(20).join(['1', '2']) }}",
    "{{ '{}-{:>5}'.format(a, 1) }}{{ '{k}'.format_map({'k': a}) }}",
    "{{ [1, 2, 3]|batch(2, 'x')|list }}{{ [1, 2, 3]|slice(2)|list }}",
    "{{ [{'k': 1}]|groupby('k')|list }}{{ 2.345|round(1) }}",
    "{{ a|indent(2, true) }}{{ a|center(9) }}{{ {'k': a}|tojson(indent=2) }}{{ '%5s'|format(a) }}{{ a|wordwrap(2) }}",
    "{{ [a, 'y']|join(', ') }}{{ [{'k': 1}]|join('-', attribute='k') }}{{ a|replace('x', 'y', 1) }}{{ dict(k=a) }}",
]


@pytest.mark.parametrize("source", [*SAME, *(shipped.source for shipped in SHIPPED.values())])
def test_the_text_is_that_of_transformers(source):
    messages = [{"role": "user", "content": "Hi <x>"}, {"role": "assistant", "content": " Yo "}] * 2
    values = {"a": "x<\nx", "messages": messages, "bos_token": "<s>", "eos_token": "</s>", "tools": None}
    assert render(compile_template(source), values) == _compile_jinja_template(source).render(values)


@pytest.mark.parametrize("expression", ["'a' + 1", "'a' + none", "'a' + b", "b.c + 'a'", "[] + 'a'"])
def test_errors_are_those_of_transformers(expression):
    source = f"{{{{ {expression} }}}}"
    said = []
    for template in (compile_template(source), _compile_jinja_template(source)):
        with pytest.raises((TypeError, jinja2.UndefinedError)) as error:
            template.render()
        said.append(str(error.value))
    assert said[0] == said[1]
