"""Chat templates: found by name or file, compiled once, rendered, and held to showing what a conversation says.

Promises:

- A rendering is what ``tokenizer.apply_chat_template`` gives, but that a template which asks for the date is always
  told the same one: ids do not depend on the day, the machine or the rank.
- ``{% generation %}`` blocks are found where they end up in the text, those inside macros included.
- A template that would leave out something that a message says is refused, with the reason.
"""

import datetime
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes

# Templates come from anywhere: this environment is a sandbox, and the one they are rendered in at inference. Nothing
# public gives it: `render_jinja_template` lets no function through to a template, so none that tells the date.
from transformers.utils.chat_template_utils import _compile_jinja_template

from kit.errors import Problem, UserError, did_you_mean

TEMPLATES = Path(__file__).parent / "templates"
# What a tokenizer must hold as single tokens for each of our templates.
REQUIRED_TOKENS = {
    "alpaca": ["eos_token"],
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "gemma": ["bos_token", "<start_of_turn>", "<end_of_turn>"],
    "llama2": ["bos_token", "eos_token"],
    "llama3": ["bos_token", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["bos_token", "eos_token", "[INST]", "[/INST]"],
    "phi3": ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "phi4": ["<|im_start|>", "<|im_sep|>", "<|im_end|>"],
    "tulu": ["eos_token"],
    "vicuna": ["eos_token"],
    "zephyr": ["eos_token"],
}
TODAY = datetime.datetime(2024, 7, 26)  # what Llama 3.1's own template says where nobody tells it the date
FIXED_DATE = f"the chat template writes today's date: these samples say {TODAY:%Y-%m-%d}, whatever the day"

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None
Span = tuple[int, int]  # characters of a rendered text: [start, end)

# What other templates write as special tokens. Tags such as <think> are plain text in many a tokenizer.
_SPECIAL = re.compile(
    r"<\|[^\s<>|]+\|>|<\uff5c[^\s<>]+\uff5c>|</?s>|<(?:bos|eos|start_of_turn|end_of_turn)>|\[/?[A-Z_]{4,}\]"
)
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters, which no text should hold
_THINK = re.compile("</?think>")


def resolve_template(tokenizer: Any, name_or_file: str | None) -> str | None:
    """The Jinja text of a named template or a file; None gives the tokenizer's own, if it has one.

    Raises ``UserError`` for an unknown name, a template that does not compile, and a named template whose special
    tokens the tokenizer would split.
    """
    if name_or_file is None:
        try:
            return tokenizer.get_chat_template() if tokenizer.chat_template else None
        except ValueError as error:  # several named templates, none of them the default
            raise UserError(Problem("chat_template", str(error).splitlines()[0], "a name or a file")) from None
    if name_or_file in REQUIRED_TOKENS:
        missing = _missing_tokens(tokenizer, name_or_file)
        if missing:
            found = f"{name_or_file!r} needs {', '.join(missing)}, which the tokenizer would split into pieces"
            raise UserError(Problem("chat_template", found, "a tokenizer that has them, or " + fitting(tokenizer)))
        return _named(name_or_file)
    if not os.path.isfile(name_or_file):  # of a name too long for a file, Path.is_file() raises OSError
        expected = f"a file, or one of {', '.join(REQUIRED_TOKENS)}"
        if "{%" in name_or_file or "{{" in name_or_file:
            raise UserError(Problem("chat_template", "the template itself", expected, "put the template in a file"))
        found = f"no template {name_or_file[:80]!r}"
        raise UserError(Problem("chat_template", found, expected, did_you_mean(name_or_file, REQUIRED_TOKENS)))
    try:
        template = Path(name_or_file).read_text(encoding="utf-8")
        _compile_jinja_template(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(Problem(f"{name_or_file}:{error.lineno}", f"not a Jinja template ({error.message})")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(name_or_file, f"cannot be read ({error})", "a UTF-8 text file")) from None
    return template


def _named(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def _missing_tokens(tokenizer: Any, name: str) -> list[str]:
    missing = []
    for token in REQUIRED_TOKENS[name]:
        text = getattr(tokenizer, token) if token in ("bos_token", "eos_token") else token
        if text is None or not _is_one_token(tokenizer, text):
            missing.append(token)
    return missing


def _is_one_token(tokenizer: Any, text: str) -> bool:
    return len(tokenizer(text, add_special_tokens=False).input_ids) == 1


def fitting(tokenizer: Any, word: str = "") -> str:
    """What to say of the named templates that ``tokenizer`` has the special tokens for, and that know ``word``."""
    names = [name for name in REQUIRED_TOKENS if word in _named(name) and not _missing_tokens(tokenizer, name)]
    return f"--chat_template {' | '.join(names)}, which fit this one" if names else "a template file of your own"


class _Marks(ext.Extension):
    """Writes a mark before and after what a ``{% generation %}`` block gives.

    transformers counts the characters rendered so far instead, which inside a macro are not those before the block.
    """

    priority = 1000  # after transformers' own extension for this tag, and so instead of it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return _OPEN + caller() + _CLOSE


class Template:
    """A chat template and the tokenizer it writes for. Refuses (``refusal``) by raising ``UserError``.

    Attributes:
        date_was_asked: a rendering has asked for the date since this was last set to False.
    """

    def __init__(self, source: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.source = source
        self.date_was_asked = False
        self._fitting: dict[str, str] = {}
        self._variables = {**tokenizer.special_tokens_map, "strftime_now": self._strftime_now}
        try:
            self._compiled = _compile_jinja_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise self.refusal(f"not a Jinja template (line {error.lineno}: {error.message})") from None

    def refusal(self, found: str, word: str = "") -> UserError:
        """To raise. Told are those of our templates that would fit, and know ``word``."""
        if word not in self._fitting:
            self._fitting[word] = fitting(self._tokenizer, word)
        return UserError(Problem("chat_template", found, "a template that fits: " + self._fitting[word]))

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the author has marked what is learned from, with ``{% generation %}`` blocks."""
        return bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source))

    @cached_property
    def split_literals(self) -> list[str]:
        """What looks like a special token in the template, and is none to the tokenizer."""
        if self.source in map(_named, REQUIRED_TOKENS):  # what these need is known, and the rest is meant as text
            return []
        tree = self._compiled.environment.parse(self.source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        literals = {literal for text in texts for literal in _SPECIAL.findall(text)}
        return sorted(literal for literal in literals if not _is_one_token(self._tokenizer, literal))

    def render(self, messages: Messages, tools: Tools, add_generation_prompt: bool = False) -> str:
        return self._render(self._compiled, messages, tools, add_generation_prompt)

    def render_marked(self, messages: Messages, tools: Tools) -> tuple[str, list[Span]]:
        """The rendering, and the characters of it that each ``{% generation %}`` block gave."""
        pieces = re.split(f"([{_OPEN}{_CLOSE}])", self._render(self._marking, messages, tools, False))
        text = "".join(pieces[::2])
        marks = pieces[1::2]
        if marks != [_OPEN, _CLOSE] * (len(marks) // 2) or text != self.render(messages, tools):
            raise self.refusal("its {% generation %} blocks cannot be found in the rendered text")
        ends = [0]
        for piece in pieces[::2]:
            ends.append(ends[-1] + len(piece))
        return text, list(zip(ends[1:-1:2], ends[2:-1:2], strict=True))

    @cached_property
    def _marking(self) -> jinja2.Template:
        return self._compiled.environment.overlay(extensions=[_Marks]).from_string(self.source)

    def _render(self, compiled: jinja2.Template, messages: Messages, tools: Tools, add_generation_prompt: bool) -> str:
        try:
            return compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise self.refusal(f"the template fails ({error})") from None

    def _strftime_now(self, format: str) -> str:
        self.date_was_asked = True
        return TODAY.strftime(format)

    def check_extras(self, messages: Messages, tools: Tools) -> None:
        """Refuse what the template never looks at: it would be left out without a word."""
        if tools and "tools" not in self._variables_read:
            raise self.refusal("the template knows no tools, and this sample lists some", "tools")
        for i, message in enumerate(messages):
            if message.get("tool_calls") and "tool_calls" not in self.source:
                raise self.refusal(f"messages[{i}]: the template knows no tool_calls", "tool_calls")
            if message.get("reasoning_content") and not re.search("reasoning_content|thinking", self.source):
                raise self.refusal(f"messages[{i}]: the template knows no reasoning_content", "reasoning_content")

    @cached_property
    def _variables_read(self) -> set[str]:
        return meta.find_undeclared_variables(self._compiled.environment.parse(self.source))

    def check_shown(self, text: str, messages: Messages, tools: Tools) -> None:
        """Refuse a ``text``, rendered from the same, that lacks a tool or what was said, message after message.

        Of the answers only what follows their thoughts is asked for: many templates forget earlier thoughts.
        """
        if tools:
            without = self.render(messages, None)  # a call of the tool may name it too
            for name in (tool.get("function", tool).get("name", "") for tool in tools):
                if text.count(name) <= without.count(name):
                    raise self.refusal(f"the template leaves out the tool {name!r}")
        at = 0
        for i, message in enumerate(messages):
            said = message["content"]
            if message["role"] == "assistant":
                said = _THINK.split(said)[-1]
            forms = [said.strip()]
            start = 0 if message["role"] == "system" else at  # some formats put it further down
            if message["role"] == "tool":  # some formats put it into JSON
                forms += [json.dumps(forms[0], ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)]
            found = [(start_of_form, form) for form in forms if (start_of_form := text.find(form, start)) >= 0]
            if not found:
                raise self.refusal(f"messages[{i}]: the template leaves its text out, or changes it")
            if message["role"] != "system":
                start_of_form, form = min(found)
                at = start_of_form + len(form)

    def check_answer(self, text: str, message: dict[str, Any], i: int) -> None:
        """Refuse a ``text`` that lacks something that ``message``, the answer number ``i``, says, thinks or calls."""
        at = 0
        for said in [message.get("reasoning_content") or "", *_THINK.split(message["content"])]:
            at = text.find(said.strip(), at) + len(said.strip())
            if at < len(said.strip()):
                raise self.refusal(f"messages[{i}]: the template leaves part of the answer out, or changes it")
        at = 0
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
            at = text.find(name, at) + len(name)
            if at < len(name) or any(key not in text for key in arguments):
                raise self.refusal(f"messages[{i}]: the template leaves out the call of {name!r}, or part of it")
