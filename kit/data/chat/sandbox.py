"""Compiles and renders chat templates, which are programs of strangers, in a process of their own.

Promises:

- A template runs in the sandbox in which transformers renders it at inference, and gives the same text.
- It ends: its process is stopped if one rendering takes more than ``CPU_SECONDS``, and may take ``MAX_BYTES`` more
  memory (on Linux). That holds in whatever thread asks, and inside a single step of Python too.

The process is forked when it is first needed, and serves one process, whose threads take turns; a fork of that one has
its own.
"""

import datetime
import json
import os
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes

CPU_SECONDS = 3  # of one rendering; ordinary ones take less than a thousandth of a second
MAX_STOPPED = 3  # calls after which a template is not tried again: others would take as long
MAX_BYTES = 1 << 30  # of memory that a template may take
AT_ONCE = 1 << 20  # characters that are rendered in one call
MAX_SOURCE = 1 << 18  # characters of a template; the longest published ones have 30,000
TODAY = datetime.datetime(2024, 7, 26)  # for every template that asks; the date of Llama 3.1 if none is given
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around what a {% generation %} block wrote: noncharacters, in no text


class TemplateError(Exception):
    """A template fails, or has no syntax. ``line`` is that of a mistake in its syntax; else 0."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class TooMuch(TemplateError):
    """A template would take too much time or memory."""


def render(
    source: str, messages: Sequence[dict[str, Any]], values: Mapping[str, Any], asked: Sequence[tuple[int, bool, bool]]
) -> list[str]:
    """Return the texts of several beginnings of a conversation: only of the first ones, if they are long.

    Args:
        values: what the template is given besides ``messages`` and ``add_generation_prompt``.
        asked: of each beginning the number of messages, ``add_generation_prompt``, and whether it has marks: then each
            ``{% generation %}`` block writes ``OPEN`` and ``CLOSE`` around its text.

    Raises ``TemplateError``, or its kind ``TooMuch``; so does ``variables``.
    """
    return list(_call(source, "render", messages, values, asked))


@lru_cache(maxsize=32)  # templates are made anew for each block of rows
def variables(source: str) -> frozenset[str]:
    """Return the variables that a template reads."""
    return frozenset(_call(source, "variables"))


class _Worker:
    """The process, as the one that asks sees it. It ends when nobody has the other end of its pipe any more."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.connection.close()
                _serve(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def ask(self, request: Any) -> Any:
        """Return the answer. Raises ``EOFError`` or ``OSError`` if the process has ended."""
        self.connection.send_bytes(json.dumps(request).encode())
        return json.loads(self.connection.recv_bytes())

    def end(self) -> None:
        """End the process."""
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


_lock = threading.RLock()
_workers: list[_Worker] = []  # at most one
_num_stopped: Counter[str] = Counter()  # calls of each template


def _forget() -> None:
    """Leave the process to the one of which this is a fork."""
    while _workers:
        _workers.pop().connection.close()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget)


def _call(source: str, *request: Any) -> Any:
    """Let the process, which is started if there is none, do something with a template. Returns what it answers."""
    if len(source) > MAX_SOURCE:
        raise TooMuch(f"{len(source)} characters, expected at most {MAX_SOURCE}")
    if _num_stopped[source] >= MAX_STOPPED:
        raise TooMuch(f"it was stopped {MAX_STOPPED} times before")
    _environment()  # imported before a process is forked, and so only once
    with _lock:
        if not _workers:
            _workers.append(_Worker())
        try:
            kind, answer = _workers[0].ask((source, *request))
        except (EOFError, OSError):
            _workers.pop().end()
            kind, answer = "much", f"it takes more than {CPU_SECONDS} seconds, or ends the process that renders it"
        except BaseException:  # of Ctrl-C: its answer would be taken for that of the next call
            _workers.pop().end()
            raise
    if kind == "error":
        raise TemplateError(*answer)
    if kind == "much":
        _num_stopped[source] += 1
        raise TooMuch(answer)
    return answer


# --- in the process


def _serve(connection: Connection) -> None:
    """Answer calls until the one that asks has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the one that asks handles them, and this ends with it
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[5]) * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    while True:
        try:
            source, name, *arguments = json.loads(connection.recv_bytes())
        except EOFError:
            return
        _limit_time()
        try:
            answer = ["done", _FUNCTIONS[name](source, *arguments)]
        except (MemoryError, RecursionError, SyntaxError):  # SyntaxError: Python's limits on nested blocks and brackets
            answer = ["much", f"it takes more than {MAX_BYTES >> 30} GiB of memory, or is nested too deeply"]
        except jinja2.TemplateSyntaxError as error:
            answer = ["error", [f"line {error.lineno}: {error.message}", error.lineno]]
        except Exception as error:  # a template is a program: it may fail in any way
            answer = ["error", [str(error)]]
        connection.send_bytes(json.dumps(answer).encode())


def _limit_time() -> None:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + CPU_SECONDS, resource.RLIM_INFINITY))


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


def _render(source: str, messages: Any, values: Mapping[str, Any], asked: Any) -> list[str]:
    texts: list[str] = []
    num_characters = 0
    for num, add_generation_prompt, has_marks in asked:
        _limit_time()
        given = {**values, "messages": messages[:num], "add_generation_prompt": add_generation_prompt}
        texts.append(_compiled(source, has_marks).render({**given, "strftime_now": TODAY.strftime}))
        num_characters += len(texts[-1])
        if num_characters > AT_ONCE:
            break
    return texts


def _variables(source: str) -> list[str]:
    environment = _compiled(source, False).environment
    return sorted(meta.find_undeclared_variables(environment.parse(source)) - set(environment.globals))


_FUNCTIONS: dict[str, Callable[..., Any]] = {"render": _render, "variables": _variables}
