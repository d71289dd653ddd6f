"""Compiles and renders untrusted chat templates in the sandbox of transformers.

Promises:

- A template gives the same text as when transformers renders it at inference.
- It ends: a rendering that takes more than ``SECONDS`` is stopped, in whatever thread. A single step of Python, such
  as a power of large numbers, is not divided.
"""

import ctypes
import datetime
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import jinja2
from jinja2 import ext, meta, nodes

SECONDS = 5  # of one rendering; ordinary ones take less than a thousandth of a second
MAX_STOPPED = 3  # renderings after which a template is not tried again: others would take as long
TODAY = datetime.datetime(2024, 7, 26)  # for every template that asks; the date of Llama 3.1 if none is given
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around what a {% generation %} block wrote: noncharacters, in no text

T = TypeVar("T")


class TemplateError(Exception):
    """A template fails, or has no syntax. ``line`` is that of a mistake in its syntax; else 0."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class TooMuch(TemplateError):
    """A template would take too much time or memory."""


def render(source: str, values: Mapping[str, Any], has_marks: bool = False) -> str:
    """Return the text that a template makes of ``values``.

    Args:
        has_marks: each ``{% generation %}`` block writes ``OPEN`` and ``CLOSE`` around its text.

    Raises ``TemplateError``, or its kind ``TooMuch``; so does ``variables``.
    """
    given = {**values, "strftime_now": TODAY.strftime}
    return _guarded(source, lambda: _compiled(source, has_marks).render(given))


@lru_cache(maxsize=32)  # templates are made again for each block of rows
def variables(source: str) -> frozenset[str]:
    """Return the variables that a template reads."""

    def read() -> frozenset[str]:
        environment = _compiled(source, False).environment
        return frozenset(meta.find_undeclared_variables(environment.parse(source)) - set(environment.globals))

    return _guarded(source, read)


def _guarded(source: str, work: Callable[[], T]) -> T:
    """Return what ``work`` does with a template. All that it raises is a ``TemplateError``."""
    if _num_stopped[source] >= MAX_STOPPED:
        raise TooMuch(f"it was stopped {MAX_STOPPED} times before")
    _environment()  # its imports take seconds
    now, rendering = _renderings(os.getpid()), _Rendering()
    now.add(rendering)
    try:
        return work()
    except _OutOfTime:
        _num_stopped[source] += 1
        raise TooMuch(f"it takes more than {SECONDS} seconds") from None
    except (MemoryError, OverflowError, RecursionError, SyntaxError):  # the last: Python's limits on nested blocks
        raise TooMuch("it takes too much memory, or is nested too deeply") from None
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"line {error.lineno}: {error.message}", error.lineno or 0) from None
    except Exception as error:  # a template is a program: it may fail in any way
        raise TemplateError(str(error)) from None
    finally:
        now.discard(rendering)


class _OutOfTime(Exception):
    """Raised in a thread that renders, by the one that watches it."""


_num_stopped: Counter[str] = Counter()  # renderings of each template


class _Rendering:
    """What a thread renders, and how long it has taken, in tenths of a second in which the interpreter was free."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.tenths = 0


@lru_cache(maxsize=1)
def _renderings(process: int) -> set[_Rendering]:
    """Return what this process renders now; a thread, started here, stops what takes too long. A fork has its own."""
    now: set[_Rendering] = set()

    def watch() -> None:
        while True:
            time.sleep(0.1)
            for each in list(now):
                each.tenths += 1
                if each.tenths > 10 * SECONDS and each in now:
                    now.discard(each)  # a second one could arrive when the first is already handled
                    late = ctypes.c_ulong(each.thread), ctypes.py_object(_OutOfTime)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(*late)

    threading.Thread(target=watch, daemon=True).start()
    return now


@lru_cache(maxsize=1)
def _environment() -> Any:
    """The environment of transformers."""
    # The public `render_jinja_template` does not pass functions on to a template, so it cannot fix the date. Imported
    # here, because the columns of data are checked before anything slow is imported.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template("").environment


class _Marks(ext.Extension):
    """Makes a ``{% generation %}`` block write a mark before and after its text.

    The extension of transformers counts the characters rendered so far instead. That is wrong inside a macro, whose
    text is inserted later.
    """

    priority = 1000  # comes after transformers' extension for this tag, and so replaces it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return OPEN + caller() + CLOSE


@lru_cache(maxsize=32)
def _compiled(source: str, marks: bool) -> jinja2.Template:
    environment = _environment()
    return (environment.overlay(extensions=[_Marks]) if marks else environment).from_string(source)
