"""The renderings of the beginnings of a conversation: of its first message, its first two, and so on.

Rendered one by one, they take time that grows with the square of the number of messages. Mostly one rendering of all
messages is enough, and it is known when:

- A template is a program without chance. Given fewer messages, it writes the same text up to the point where it asks
  for a message that is missing, or for their number. So it is given messages that note when they are asked for.
- If it is its loop over the messages that asks first, then with fewer messages the loop ends there, and what comes
  after the loop follows. That is the same text for any number of messages if it mentions nothing that the template
  itself computes.

Where that is not so, a beginning is rendered by itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes

if TYPE_CHECKING:
    from kit.data.chat.template import Template

MAX_RENDERED = 1 << 28  # characters of the beginnings of one conversation: seconds
Message = dict[str, Any]

# Functions that are put into a template: around what its loop goes over, and at both ends of the body of the loop.
_WALK, _ENTER, _LEAVE = "kit_walk", "kit_enter", "kit_leave"
_OTHER_TEXTS = (nodes.Extends, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport)


class Beginnings:
    """The renderings of the first message, the first two, and so on, as far as one rendering of all gives them."""

    def __init__(self, found: tuple[str, list[int | None], int] | None) -> None:
        """
        Args:
            found: what ``walk`` has returned.
        """
        self._text, self._ends, loop_end = found or ("", [], 0)
        self._tail = self._text[loop_end:]

    def first(self, num: int) -> str | None:
        """Return the rendering of the first ``num`` messages; None if they must be rendered by themselves."""
        end = self._ends[num - 1] if 0 < num <= len(self._ends) else None
        return None if end is None else self._text[:end] + self._tail


def walk(
    template: jinja2.Template, messages: Sequence[Message], values: Mapping[str, Any]
) -> tuple[str, list[int | None], int] | None:
    """Render a template that ``walking`` has made, and see where it asks for the next message.

    Args:
        values: what the template is given besides ``messages``.

    Returns:
        The text; of each beginning where it ends in it, None if it must be rendered by itself; and where the loop ends.
        None if the template fails, or does what is not followed here.
    """
    reads = _Reads(len(messages))
    functions = {_WALK: reads.walk, _ENTER: reads.enter, _LEAVE: reads.leave}
    try:
        text = reads.write(template, {**values, **functions, "messages": _Messages(reads, messages, 0)})
    except Exception:
        return None
    return None if reads.loop_end is None else (text, reads.ends, reads.loop_end)


class Conversation:
    """The messages of a conversation up to its last answer, and the renderings of their beginnings."""

    def __init__(self, template: "Template", messages: Sequence[Message], tools: Any) -> None:
        self.messages = messages
        self.tools = tools
        self._template = template
        self._beginnings: dict[bool, Beginnings] = {}  # without and with the generation prompt
        self._marked: Beginnings | None = None
        self._num_rendered = 0  # characters of the beginnings that were rendered by themselves

    def render(self, num: int, add_generation_prompt: bool = False) -> str:
        """Return the rendering of the first ``num`` messages, as ``Template.render`` does."""
        # No prompt follows the last answer, and some templates refuse one there.
        messages = self.messages[:-1] if add_generation_prompt else self.messages
        if num < len(messages) and add_generation_prompt not in self._beginnings:
            made = self._template.beginnings(messages, self.tools, add_generation_prompt)
            self._beginnings[add_generation_prompt] = made
        text = None
        if add_generation_prompt in self._beginnings:
            text = self._beginnings[add_generation_prompt].first(num)
        if text is not None:
            return text
        text = self._template.render(self.messages[:num], self.tools, add_generation_prompt)
        self._num_rendered += len(text)
        if self._num_rendered > MAX_RENDERED:
            raise self._template.too_long(MAX_RENDERED)
        return text

    def render_marked(self, num: int) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendering of the first ``num`` messages with its marks, as ``Template.render_marked`` does."""
        if num < len(self.messages) and self._marked is None:
            self._marked = self._template.beginnings(self.messages, self.tools, marks=True)
        marked = self._marked.first(num) if self._marked else None
        if marked is None:
            return self._template.render_marked(self.messages[:num], self.tools)
        return self._template.located(marked, self.render(num))


class _Unfollowed(Exception):
    """The template does something with the messages that is not followed here."""


class _Reads:
    """What a template has written when it asks for messages."""

    def __init__(self, num: int) -> None:
        self.num_written = 0  # characters
        # Of each beginning, what was written when the loop asked for the next message; None if something else asked.
        self.ends: list[int | None] = []
        self.loop_end: int | None = None  # what was written when the loop had ended
        self._num = num
        self._num_loops = 0
        self._is_in_body = False

    def write(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """Render ``template``, and count what it writes."""
        pieces = []
        for piece in template.generate(values):
            self.num_written += len(piece)
            pieces.append(piece)
        return "".join(pieces)

    def ask(self, index: int, is_loop: bool = False) -> None:
        """Note that the template asks whether there is a message ``index``, and for what it is."""
        num_new = min(index, self._num) - len(self.ends)
        if not is_loop and num_new == self._num:
            raise _Unfollowed  # nothing will be known
        self.ends += [self.num_written if is_loop else None] * num_new

    def ask_number(self) -> None:
        """Note that the template asks for the number of messages."""
        self.ask(self._num)

    def walk(self, messages: Any) -> Iterator[Message]:
        """Return ``messages`` for the loop of the template."""
        self._num_loops += 1
        if not isinstance(messages, _Messages) or self._num_loops > 1:
            raise _Unfollowed
        return messages.each(self.ask_in_loop)

    def enter(self) -> None:
        """Note that the body of the loop begins: what it asks of ``loop``, such as ``loop.last``, looks ahead."""
        self._is_in_body = True

    def leave(self) -> None:
        """Note that the body of the loop ends."""
        self._is_in_body = False

    def ask_in_loop(self, index: int) -> None:
        """Note that the loop, or what its body asks of ``loop``, asks for a message."""
        is_loop = not self._is_in_body
        self.ask(index, is_loop)
        if is_loop and index == self._num:
            self.loop_end = self.num_written


class _Messages:
    """Messages as a template is given them: what it asks is noted, and what a list would do otherwise fails."""

    def __init__(self, reads: _Reads, messages: Sequence[Message], first: int) -> None:
        self._reads = reads
        self._messages = messages
        self._first = first  # index of the first of them that this object has

    def each(self, ask: Callable[[int], None]) -> "_Each":
        """Return an iterator that calls ``ask`` for each message, and for the one behind the last."""
        return _Each(self._messages, self._first, ask)

    def __iter__(self) -> Iterator[Message]:
        return self.each(self._reads.ask)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and key >= 0:
            self._reads.ask(self._first + key)
        elif isinstance(key, slice) and key.stop is None and key.step is None and (key.start or 0) >= 0:
            return _Messages(self._reads, self._messages, self._first + (key.start or 0))
        else:
            self._reads.ask_number()
        return list(self._messages[self._first :])[key]

    def __bool__(self) -> bool:
        self._reads.ask(self._first)
        return self._first < len(self._messages)

    def __len__(self) -> int:
        self._reads.ask_number()
        return max(0, len(self._messages) - self._first)

    def __getattr__(self, name: str) -> Any:
        raise _Unfollowed

    def __eq__(self, other: object) -> bool:
        raise _Unfollowed

    def __str__(self) -> str:
        raise _Unfollowed

    __repr__ = __str__
    __hash__ = None  # type: ignore[assignment]


class _Each(Iterator[Message]):
    """Goes over messages. Unlike a generator, it asks again when it is called again behind the last one."""

    def __init__(self, messages: Sequence[Message], first: int, ask: Callable[[int], None]) -> None:
        self._messages = messages
        self._index = first
        self._ask = ask

    def __next__(self) -> Message:
        self._ask(min(self._index, len(self._messages)))
        if self._index >= len(self._messages):
            raise StopIteration
        self._index += 1
        return self._messages[self._index - 1]


def walking(tree: nodes.Template) -> nodes.Template | None:
    """Return a parsed template with the functions in it; None if it has another form.

    The form: the last loop that is not inside anything else goes over messages, and what comes behind it depends on
    nothing that the template computed from them.
    """
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    if not loops or next(tree.find_all(_OTHER_TEXTS), None):
        return None
    loop = loops[-1]
    at = tree.body.index(loop)
    computed = {"messages", *(macro.name for macro in tree.find_all(nodes.Macro))}
    computed |= _stored([tree]) - _settled(tree, tree.body[:at])
    if loop.recursive or loop.test or loop.else_ or _named(tree.body[at + 1 :]) & computed:
        return None
    loop.iter = _call(_WALK, loop.iter)
    loop.body = [nodes.ExprStmt(_call(_ENTER)), *loop.body, nodes.ExprStmt(_call(_LEAVE))]
    return tree


def _settled(tree: nodes.Template, before: Sequence[nodes.Node]) -> set[str]:
    """The names that are set only ``before`` the loop and from nothing but constants and themselves.

    Many templates begin with ``{% if add_generation_prompt is not defined %}{% set add_generation_prompt = false %}``.
    """
    names = set()
    for node in before:
        stored = _stored([node])
        kinds = {type(node), *map(type, node.find_all((nodes.Stmt, nodes.Call, nodes.NSRef)))}
        if len(stored) == 1 and kinds <= {nodes.Assign, nodes.If, nodes.Output} and _named([node]) == stored:
            names |= stored
    return names - _stored([node for node in tree.body if not _stored([node]) <= names])


def _named(tree: Sequence[nodes.Node]) -> set[str]:
    """The names in parts of a template."""
    found = [name for node in tree for name in node.find_all(nodes.Name)]
    return {name.name for name in [*found, *(node for node in tree if isinstance(node, nodes.Name))]}


def _stored(tree: Sequence[nodes.Node]) -> set[str]:
    """The names that parts of a template give a value."""
    return {name.name for node in tree for name in node.find_all(nodes.Name) if name.ctx != "load"}


def _call(name: str, *arguments: Any) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)
