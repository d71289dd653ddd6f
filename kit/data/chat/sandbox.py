"""Compiles and renders chat templates, which are programs of strangers, with bounds on their time and memory.

Promises:

- A template runs in the sandbox in which transformers renders it at inference, and gives the same text.
- It ends: after ``CPU_SECONDS``, or when it has taken ``MAX_BYTES`` more memory, it is stopped. Both are looked at
  between two steps of Python, so what could be long or large in a single step is checked before it is done.

The time is not bounded in a thread other than the main one, in which rows of a stream are rendered. But the first rows
of each data set are rendered in the main thread, before a run begins.
"""

import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from types import BuiltinMethodType
from typing import Any, ClassVar

import jinja2
import psutil
from jinja2 import nodes
from jinja2.runtime import markup_join, str_join
from jinja2.visitor import NodeTransformer

CPU_SECONDS = 3.0  # of one rendering; ordinary ones take less than a thousandth of a second
MAX_STOPPED = 3  # renderings after which a template is not tried again: others would take as long
MAX_BYTES = 1 << 30  # of memory that one rendering may add
MAX_LENGTH = 1 << 25  # characters of a string, or items of a list; a row of data has less
MAX_ITEMS = 1 << 20  # values in a list or dict, where a value that it holds twice counts twice
MAX_COUNT = 100_000  # of what a filter makes at once; jinja2's own limit of range()
MAX_SOURCE = 1 << 18  # characters of a template; the longest published ones have 30,000
_TICK_SECONDS = 0.1
_MAIN_THREAD = threading.main_thread().ident


class TooMuch(Exception):
    """A template would take too much time or memory."""


@lru_cache(maxsize=32)
def compile_template(source: str, *extensions: Any) -> jinja2.Template:
    """Compile a template. Raises ``jinja2.TemplateSyntaxError``, or ``TooMuch`` if it is too long or too deep."""
    if len(source) > MAX_SOURCE:
        raise TooMuch(f"{len(source)} characters, expected at most {MAX_SOURCE}")
    environment = _environment().overlay(extensions=extensions)
    try:
        return compile_tree(environment, environment.parse(source), source)
    except (RecursionError, MemoryError, SyntaxError):  # SyntaxError: Python's limits on nested blocks and brackets
        raise TooMuch("nested too deeply") from None


def compile_tree(environment: jinja2.Environment, tree: nodes.Template, source: str) -> jinja2.Template:
    """Compile ``tree``, parsed from ``source`` and maybe changed, in the environment of a compiled template."""
    return environment.from_string(_Bounded(environment, _MAKES_MARKUP.search(source) is not None).visit(tree))


@lru_cache(maxsize=1)
def _environment() -> Any:
    """The environment of transformers, with other operators, filters and methods where one call can be too much."""
    # Templates come from untrusted sources. This compiles them in the sandbox in which transformers renders them at
    # inference. The public `render_jinja_template` does not pass functions on to a template, so it cannot fix the date.
    # Imported here, because the columns of data are checked before anything slow is imported.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: Any = _compile_jinja_template("").environment.overlay()
    checked = {name: _checked(environment.filters[name], check) for name, check in _FILTERS.items()}
    for name in ("batch", "slice", "groupby"):
        checked[name] = _counted(checked.get(name, environment.filters[name]))
    environment.filters = {**environment.filters, **checked, **_OPERATORS}
    environment.globals = {**environment.globals, "dict": _Dict(), "lipsum": None}
    wrap_format = environment.wrap_str_format

    def wrap(value: Any) -> Any:
        """Wrap a method of a string or number; jinja2 calls this for each attribute that a template reads."""
        check = _METHODS.get(value.__name__) if type(value) is BuiltinMethodType else None
        if check is None:
            return None
        return partial(_call, check, value.__self__, wrap_format(value) or value)

    environment.wrap_str_format = wrap
    return environment


class _Watch:
    """What the timer looks at, see ``_tick``."""

    is_on = False  # the timer
    is_rendering = False
    began: tuple[float, int] | None = None  # CPU seconds and bytes of memory at the first tick of the rendering
    num_stopped: ClassVar[Counter[jinja2.Template]] = Counter()  # renderings of each template


@contextmanager
def watched() -> Iterator[None]:
    """Start the timer once for all renderings in the ``with`` block, since that takes as long as a tenth of one."""
    if _Watch.is_on or threading.get_ident() != _MAIN_THREAD or not _can_stop():
        yield
        return
    # It must not run on later: in another program, or at the end of this one, nothing handles its signal.
    signal.setitimer(signal.ITIMER_PROF, _TICK_SECONDS, _TICK_SECONDS)
    _Watch.is_on = True
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _Watch.is_on = False


def _text(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    return template.render(values)


def render(
    template: jinja2.Template,
    values: Mapping[str, Any],
    write: Callable[[jinja2.Template, Mapping[str, Any]], str] = _text,
) -> str:
    """Render a compiled template. Raises ``TooMuch`` if it takes too much, and whatever the template raises.

    Args:
        write: renders the template; it may note what is written meanwhile.
    """
    if threading.get_ident() != _MAIN_THREAD:
        return write(template, values)
    if not _Watch.is_on:
        with watched():
            return _render(template, values, write)
    return _render(template, values, write)


def _render(template: jinja2.Template, values: Mapping[str, Any], write: Callable[..., str]) -> str:
    if _Watch.num_stopped and _Watch.num_stopped[template] >= MAX_STOPPED:
        raise TooMuch(f"it was stopped {MAX_STOPPED} times before")
    _Watch.began = None
    _Watch.is_rendering = True
    try:
        return write(template, values)
    except TooMuch:
        _Watch.num_stopped[template] += 1
        raise
    finally:
        _Watch.is_rendering = False


def _tick(*_: Any) -> None:
    if not _Watch.is_rendering:
        return
    now = time.thread_time(), psutil.Process().memory_info().rss
    if _Watch.began is None:
        _Watch.began = now
    if now[0] - _Watch.began[0] > CPU_SECONDS:
        raise TooMuch(f"it takes more than {CPU_SECONDS:.0f} seconds")
    if now[1] - _Watch.began[1] > MAX_BYTES:
        raise TooMuch(f"it takes more than {MAX_BYTES >> 30} GiB of memory")


@cache
def _can_stop() -> bool:
    """Whether ``_tick`` handles the signal of the timer. Another library that does so is left alone."""
    handler = signal.getsignal(signal.SIGPROF)
    if handler is signal.SIG_DFL:
        signal.signal(signal.SIGPROF, _tick)
        return True
    return handler is _tick


# What makes a string of the type Markup, which a sum escapes the other strings for.
_MAKES_MARKUP = re.compile(r"autoescape|\b(?:e|escape|forceescape|safe|urlize|xmlattr)\b")


class _Bounded(NodeTransformer):
    """Replaces the operators, lists and dicts of a template that can make much by filters that check what they make.

    Jinja's own way, ``intercepted_binops``, would take longer: a sum of five strings is one call here, and no slower
    than without a check.
    """

    def __init__(self, environment: jinja2.Environment, has_markup: bool) -> None:
        self._environment = environment
        self._sum = "kit sum" if has_markup else "kit sum of strings"

    def _filter(self, name: str, first: Any, others: list[Any]) -> nodes.Node:
        made = nodes.Filter(first, name, others, [], None, None, lineno=first.lineno)
        return made.set_environment(self._environment)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """``a + b + c`` becomes one call."""
        parts: list[Any] = []
        left: Any = node
        while isinstance(left, nodes.Add):
            parts.append(self.visit(left.right))
            left = left.left
        parts.append(self.visit(left))
        parts.reverse()
        return self._filter(self._sum, parts[0], parts[1:])

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """``a ~ b`` becomes a call."""
        first, *others = [self.visit(part) for part in node.nodes]
        return self._filter("kit concat", first, others)

    def _visit_operator(self, node: Any) -> nodes.Node:
        return self._filter(f"kit {node.operator}", self.visit(node.left), [self.visit(node.right)])

    visit_Mul = visit_Pow = visit_Mod = _visit_operator

    def _visit_items(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        items = [pair.value for pair in node.items] if isinstance(node, nodes.Dict) else node.items
        is_target = getattr(node, "ctx", "load") != "load"
        if is_target or all(isinstance(item, nodes.Const | nodes.TemplateData) for item in items):
            return node
        return self._filter("kit tree", node, [])

    visit_List = visit_Tuple = visit_Dict = _visit_items


def _within(length: float) -> None:
    if length > MAX_LENGTH:
        raise TooMuch(f"it makes a text or list of more than {MAX_LENGTH >> 20} million characters or items")


def _sum_of_strings(*parts: Any) -> Any:
    if len(parts) < 20:
        try:
            text = "".join(parts)
        except TypeError:
            return _sum(*parts)
        if len(text) > MAX_LENGTH:
            _within(len(text))
        return text
    return _sum(*parts)


def _sum(total: Any, *parts: Any) -> Any:
    for part in parts:
        total = total + part
        if isinstance(total, str | list) and len(total) > MAX_LENGTH:
            _within(len(total))
    return total


@jinja2.pass_eval_context
def _concat(context: nodes.EvalContext, *parts: Any) -> str:
    text = (markup_join if context.autoescape else str_join)(parts)
    _within(len(text))
    return text


def _tree(value: Any) -> Any:
    """Return a list or dict that is not too large when it is written out, as a value that is in it twice would be."""
    waiting = [value]
    count = 0
    while waiting:
        item = waiting.pop()
        count += 1
        if count > MAX_ITEMS:
            raise TooMuch(f"it makes lists in lists of more than {MAX_ITEMS} values")
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
    return value


class _Dict:
    """The function ``dict`` of templates; as that of transformers, it is not the type, whose attributes lead out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _tree(dict(*args, **kwargs))

    def fromkeys(self, *args: Any) -> Any:
        return _tree(dict.fromkeys(*args))


def _size(value: Any) -> int:
    """The length of a string, list or dict; the bits of a whole number; else 0."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _times(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _within(_size(left) + _size(right))
    else:
        _within(max(_size(left) * _number(right), _size(right) * _number(left)))
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _within(_size(left) * abs(right))
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    if type(left) is not int and isinstance(left, str):
        _check_format(left, *(right if isinstance(right, tuple) else [right]))
    return left % right


# By names that no template can write.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "kit sum": _sum,
    "kit sum of strings": _sum_of_strings,
    "kit concat": _concat,
    "kit tree": _tree,
    "kit *": _times,
    "kit **": _power,
    "kit %": _modulo,
}
_DIGITS = re.compile(r"\d+")


def _check_format(text: Any, *args: Any, **kwargs: Any) -> None:
    """A format has widths in its text, and may write an argument as often as it has a mark for it."""
    text = str(text)
    if "*" in text or ("{" in text and re.search(r"\{[^{}]*\{", text)):
        widths = sum(map(_number, args)) + sum(map(_number, kwargs.values()))
    else:
        widths = 0
    widths += sum(int(digits[:10]) for digits in _DIGITS.findall(text))
    longest = max(map(_size, _leaves([*args, *kwargs.values()])), default=0)
    _within(widths + len(text) + max(text.count("%"), text.count("{")) * longest)


def _leaves(values: list[Any]) -> Iterator[Any]:
    """The values, and those in dicts among them."""
    for value in values:
        yield value
        if isinstance(value, dict):
            yield from value.values()


def _check_width(value: Any, *args: Any, **kwargs: Any) -> None:
    _within(max(map(_number, [*args, *kwargs.values()]), default=0))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **kwargs: Any) -> None:
    """Each ``old`` may become a long ``new``."""
    new = kwargs.get("new", new)
    if _size(new) > 1 and (_size(text) + 1) * _size(new) > MAX_LENGTH:
        _within(_size(text) + str(text).count(str(kwargs.get("old", old))) * _size(new))


def _check_join(values: Any, separator: Any = "", *_: Any, **kwargs: Any) -> None:
    if isinstance(values, list | tuple | str):
        longest = _size(kwargs.get("d", separator)) * len(values)
        _within(longest + (0 if isinstance(values, str) else sum(map(_size, values))))


def _check_indent(text: Any, width: Any = 4, *_: Any, **kwargs: Any) -> None:
    width = kwargs.get("width", width)
    each = _size(width) if isinstance(width, str) else _number(width)
    _within(_size(text) + each * (str(text).count("\n") + 1))


def _check_count(value: Any, *args: Any, **kwargs: Any) -> None:
    for number in map(_number, [*args, *kwargs.values()]):
        if number > MAX_COUNT:
            raise TooMuch(f"a filter is asked for {number} items")


def _check_indents(value: Any, *args: Any, **kwargs: Any) -> None:
    """Of JSON: each value may have a line, each level an indent. Of wrapped lines: each may have a long break."""
    for each in [*args, *kwargs.values()]:
        if (isinstance(each, str) and len(each) > 1000) or (isinstance(each, int) and each > MAX_COUNT):
            raise TooMuch("a filter is asked for very long lines")


# Each is called with the arguments of a filter, or with a method's object and arguments, before that is.
_FILTERS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "batch": _check_count,
    "slice": _check_count,
    "round": _check_count,
    "tojson": _check_indents,
    "wordwrap": _check_indents,
}
_METHODS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "ljust": _check_width,
    "rjust": _check_width,
    "zfill": _check_width,
    "to_bytes": _check_width,
    "expandtabs": lambda text, size=8: _within(_size(text) * max(1, _number(size))),
    "replace": _check_replace,
    "translate": lambda text, table: _within(_size(text) * max(map(_size, _leaves([table])), default=1)),
    "join": lambda separator, values: _check_join(values, separator),
    "format": _check_format,
    "format_map": lambda text, values: _check_format(text, values),
}


def _call(check: Callable[..., None], owner: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    check(owner, *args, **kwargs)
    return method(*args, **kwargs)


def _passes(function: Any) -> int:
    """How many arguments jinja2 puts before those that the template gives."""
    return int(hasattr(function, "jinja_pass_arg"))


def _checked(function: Any, check: Callable[..., None]) -> Any:
    """A filter that is checked before it is called."""
    num_passed = _passes(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        check(*args[num_passed:], **kwargs)
        return function(*args, **kwargs)

    return _marked_as(function, call)


def _counted(function: Any) -> Any:
    """A filter whose result, lists in a list, is counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _tree(list(function(*args, **kwargs)))

    return _marked_as(function, call)


def _marked_as(function: Any, call: Any) -> Any:
    """``call``, given the same first argument by jinja2 as ``function``."""
    if _passes(function):
        call.jinja_pass_arg = function.jinja_pass_arg
    return call
