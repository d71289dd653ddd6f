"""Chat templates: found by name or file, compiled once, and rendered.

Promises:

- A rendering equals that of ``tokenizer.apply_chat_template``, with one exception: a template that asks for the date
  is always given the same date, so that ids do not depend on the day, the machine or the rank.
- ``{% generation %}`` blocks are located in the rendered text, also those inside macros.
- ``chat_template_kwargs`` become defaults of the template itself, so whoever renders it later gets the same text. A
  name that the template never reads is refused.
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from kit.data.chat.media_parts import has_media, parts_of
from kit.data.chat.sandbox import CLOSE, OPEN, TODAY, TemplateError, render, variables
from kit.data.chat.shipped import SHIPPED, fitting, is_one_token, without_header
from kit.system.durable import read_small
from kit.system.errors import Problem, UserError, did_you_mean

FIXED_DATE = f"the chat template writes today's date: these samples say {TODAY:%Y-%m-%d}, whatever the day"

# Remedies for a conversation that a template does not take.
OTHER_TEMPLATE = "give another template as --chat_template, or write the rows as this one takes them"
BLOCKS = "correct the {% generation %} blocks in a copy of the template, given as --chat_template, or take them out"
AS_REASONING = "move the text between the tags into reasoning_content of the message"
AS_CONTENT = (
    "begin the content with the reasoning, in the template's tags, each on its own line: "
    '"<think>\n...\n</think>\n\n..."'
)

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None
Jinja = str | dict[str, str] | None  # Jinja text; or several by name, "default" and others; None: no template
Span = tuple[int, int]  # characters of a rendered text: [start, end)

# Texts that look like special tokens. Tags such as <think> do not count: in many tokenizers they are plain text.
_SPECIAL = re.compile(
    r"<\|[^\s<>|]+\|>|<\uff5c[^\s<>]+\uff5c>|</?s>|<(?:bos|eos|start_of_turn|end_of_turn)>|\[/?[A-Z_]{4,}\]"
)
_PROBE = "probe-text"  # of a message, to see whether a template shows it
# Variables that are not for ``chat_template_kwargs``: the conversation itself gives them.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}


def resolve_template(tokenizer: Any, name_or_file: str | None, kwargs: Mapping[str, Any] | None = None) -> Jinja:
    """Return the Jinja text of a template, given by its name or its file. None stands for the tokenizer's own template.

    ``kwargs`` become the defaults of variables that the template reads. Returns a dict if the tokenizer has several
    named templates, None if it has none. Raises ``UserError`` if there is no such name or file, if the template does
    not compile or reads none of ``kwargs``, or if the tokenizer would split a special token that it needs.
    """
    source = _find_template(tokenizer, name_or_file)
    if not kwargs:
        return source
    if source is None:
        fix = "leave it out, or give the file of a template that reads these variables"
        raise UserError("chat_template_kwargs", "there is no chat template", fix=fix)
    named = source if isinstance(source, dict) else {"": source}
    read = {name: Template(text, tokenizer).variables for name, text in named.items()}
    # What the tokenizer gives, such as bos_token, would win over a default.
    check_kwargs(kwargs, set().union(*read.values()) - set(tokenizer.special_tokens_map))
    for name, text in named.items():
        # Statements that give variables values where they have none, as Python writes them: Jinja has no null. The line
        # break after a statement is not rendered.
        values = ((key, value) for key, value in kwargs.items() if key in read[name])
        named[name] = "".join(f"{{%- set {key} = {key} | default({value!r}) %}}\n" for key, value in values) + text
    return named if isinstance(source, dict) else named[""]


def no_template(tokenizer: Any) -> Problem:
    """The problem of a chat whose tokenizer has no template."""
    fix = f"--chat_template {' | '.join([*fitting(tokenizer), 'FILE'])}"
    return Problem("chat_template", "the tokenizer has no chat template of its own", fix=fix)


def check_kwargs(kwargs: Mapping[str, Any], variables: Set[str], fix: str = "") -> None:
    """Raise ``UserError`` if one of ``kwargs`` is not among the ``variables`` that a template reads.

    ``fix``: what to do where no variable has a similar name.
    """
    free = sorted(variables - _GIVEN)
    for key in kwargs:
        if key in free:
            continue
        found = f"the chat template does not use {key!r}"
        expected = "one of " + ", ".join(free) if free else "none"
        raise UserError("chat_template_kwargs", found, expected, did_you_mean(key, free) or fix)


def _find_template(tokenizer: Any, name_or_file: str | None) -> Jinja:
    """Return the template that ``resolve_template`` finds, without values for its variables."""
    if name_or_file is None:
        return _template_of_tokenizer(tokenizer)
    if name_or_file in SHIPPED:
        return _shipped_template(tokenizer, name_or_file)
    if os.path.isfile(name_or_file):  # Path.is_file() raises OSError if the name is too long for a file
        return _template_in_file(name_or_file)
    expected = f"a file, or one of {', '.join(SHIPPED)}"
    if "{%" in name_or_file or "{{" in name_or_file:
        raise UserError("chat_template", "the template itself", expected, "put the template in a file")
    found = f"no template {name_or_file[:80]!r}"
    raise UserError("chat_template", found, expected, did_you_mean(name_or_file, SHIPPED))


def _template_of_tokenizer(tokenizer: Any) -> Jinja:
    named = tokenizer.chat_template
    if isinstance(named, dict) and "default" in named and len(named) > 1:
        return dict(named)
    try:
        return tokenizer.get_chat_template() if named else None
    except ValueError as error:  # several named templates, none of them the default
        raise UserError("chat_template", str(error).splitlines()[0], "a name or a file") from None


def _shipped_template(tokenizer: Any, name: str) -> str:
    if missing := SHIPPED[name].missing_tokens(tokenizer):
        found = f"{name!r} needs {', '.join(missing)}, which the tokenizer would split into pieces"
        fix = "add special tokens with --new_tokens, which trains their rows too; or take another template"
        raise UserError("chat_template", found, "a tokenizer that has them", fix)
    return SHIPPED[name].source


def _template_in_file(path: str) -> str:
    try:
        text = read_small(path)
        variables(text)
    except TemplateError as error:
        where = f"{path}:{error.line}" if error.line else path
        raise UserError(where, f"not a Jinja template ({error})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read ({error})", "a UTF-8 text file") from None
    return without_header(text)  # so that a template of the kit is the same by its name and by its file


class Template:
    """A chat template, compiled for a tokenizer. Methods that refuse a conversation raise ``UserError``.

    Attributes:
        source: the Jinja text.
        reads_media: it is given images as parts of messages.

    Raises ``UserError`` if ``source`` does not compile.
    """

    def __init__(self, source: str, tokenizer: Any, reads_media: bool = False) -> None:
        self._tokenizer = tokenizer
        self.reads_media = reads_media
        self.source = source
        self._values: dict[str, Any] = dict(tokenizer.special_tokens_map)
        try:
            self.variables = variables(source)  # that it reads, such as messages and enable_thinking
        except TemplateError as error:
            raise self.refusal(f"not a Jinja template ({error})") from None

    def with_values(self, kwargs: Mapping[str, Any]) -> "Template":
        """Return this template with values for its variables. Raises ``UserError`` if it reads no such variable."""
        check_kwargs(kwargs, self.variables, "--dataset_columns chat_template_kwargs=ignore")
        template = copy.copy(self)
        template._values = {**self._values, **kwargs}
        return template

    def refusal(self, found: str, fix: str = OTHER_TEMPLATE) -> UserError:
        """Return the exception to raise for a conversation, or a template, that cannot be used."""
        return UserError("chat_template", found, fix=fix)

    def too_long(self, most: int) -> UserError:
        """Return the exception to raise for a conversation that takes more than ``most`` characters in all texts."""
        found = "too long: all earlier turns are rendered again for each answer"
        expected = f"at most {most >> 20} million characters in all"
        return UserError("messages", found, expected, "split the conversation into several rows")

    def writes_date(self, text: str) -> bool:
        """Whether ``text``, a rendering, seems to have the date for which the template asks."""
        return "strftime_now" in self.source and f"{TODAY:%Y}" in text

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the template has ``{% generation %}`` blocks, which mark the supervised text."""
        return bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source))

    @cached_property
    def split_literals(self) -> list[str]:
        """Texts of the template that look like special tokens, but are split by the tokenizer."""
        if any(self.source == shipped.source for shipped in SHIPPED.values()):
            return []  # the tokens that it needs were checked, all else in it is plain text
        literals = set(_SPECIAL.findall(self.source))
        return sorted(literal for literal in literals if not is_one_token(self._tokenizer, literal))

    def render(
        self, messages: Messages, tools: Tools, add_generation_prompt: bool = False, has_marks: bool = False
    ) -> str:
        """Return the conversation as text; with ``add_generation_prompt``, as the model is given it to write an answer.

        ``has_marks`` is that of ``sandbox.render``. Raises ``UserError`` if the template fails.
        """
        values = {"messages": self._as_read(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return render(self.source, self._given(tools) | values, has_marks)
        except TemplateError as error:
            raise self.refusal(f"the template fails ({error})") from None

    def located(self, marked: str, rendered: str) -> list[Span]:
        """Return the span of ``rendered`` that each ``{% generation %}`` block gave.

        ``marked`` is the same rendering with marks. Raises ``UserError`` if its blocks cannot be located.
        """
        pieces = re.split(f"([{OPEN}{CLOSE}])", marked)
        text = "".join(pieces[::2])
        marks = pieces[1::2]
        if marks != [OPEN, CLOSE] * (len(marks) // 2) or text != rendered:
            raise self.refusal("its {% generation %} blocks cannot be found in the rendered text", BLOCKS)
        ends = [0]
        for piece in pieces[::2]:
            ends.append(ends[-1] + len(piece))
        return list(zip(ends[1:-1:2], ends[2:-1:2], strict=True))

    def _as_read(self, messages: Messages) -> Messages:
        """The messages as the template reads them: as a list of parts if they have images, or if it shows no other."""
        if not self._reads_parts_only and not self.reads_media:
            return messages
        return [message | {"content": self._parts(message.get("content"))} for message in messages]

    def _parts(self, content: Any) -> Any:
        if not isinstance(content, str) or not (self._reads_parts_only or has_media(content)):
            return content
        if not self.reads_media:
            return [{"type": "text", "text": content}]
        return parts_of(content)

    @cached_property
    def _reads_parts_only(self) -> bool:
        """Whether the text of a message shows only if it is given as a part, as templates of processors have it."""

        def shows(content: Any) -> bool:
            try:
                messages = [{"role": "user", "content": content}]
                return _PROBE in render(self.source, {**self._given(None), "messages": messages})
            except TemplateError:
                return False

        return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])

    def _given(self, tools: Tools) -> dict[str, Any]:
        """The variables of the template, without the messages and the flag."""
        return {"tools": tools, "documents": None, "add_generation_prompt": False, **self._values}

    @cached_property
    def reads_prompt_flag(self) -> bool:
        """Whether the template reads ``add_generation_prompt``. Some of the others always open the next turn."""
        return "add_generation_prompt" in self.variables
