"""Chat templates: found by name or file, compiled once, rendered, and checked to leave nothing out.

Promises:

- A rendering equals that of ``tokenizer.apply_chat_template``, with one exception: a template that asks for the date
  is always given the same date, so that ids do not depend on the day, the machine or the rank.
- ``{% generation %}`` blocks are located in the rendered text, also those inside macros.
- If a template would leave out something that a message says, it is refused, with the reason.
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

# Templates come from untrusted sources. This compiles them in the sandbox in which transformers renders them at
# inference. The public `render_jinja_template` does not pass functions on to a template, so it cannot fix the date.
from transformers.utils.chat_template_utils import _compile_jinja_template

from kit.errors import Problem, UserError, did_you_mean

TEMPLATES = Path(__file__).parent / "templates"
# The kit's own templates, each with what a tokenizer must have as single tokens.
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
TODAY = datetime.datetime(2024, 7, 26)  # the date in Llama 3.1's own template if none is given
FIXED_DATE = f"the chat template writes today's date: these samples say {TODAY:%Y-%m-%d}, whatever the day"

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None
Span = tuple[int, int]  # characters of a rendered text: [start, end)

# What looks like a special token. Tags such as <think> do not count: in many tokenizers they are plain text.
_SPECIAL = re.compile(
    r"<\|[^\s<>|]+\|>|<\uff5c[^\s<>]+\uff5c>|</?s>|<(?:bos|eos|start_of_turn|end_of_turn)>|\[/?[A-Z_]{4,}\]"
)
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters, which should not occur in any text
_THINK = re.compile("</?think>")


def resolve_template(tokenizer: Any, name_or_file: str | None) -> str | None:
    """The Jinja text of a template, given by its name or its file. None stands for the tokenizer's own template.

    Returns None if the tokenizer has none. Raises ``UserError`` if there is no such name or file, if the template does
    not compile, or if the tokenizer would split a special token that a named template needs.
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
            expected = "a tokenizer that has them, or " + fitting(tokenizer)
            # A BOS or EOS has a role too, which only the tokenizer can give it.
            can_add = not {"bos_token", "eos_token"}.intersection(missing)
            fix = f"--new_tokens '{','.join(missing)}' adds them and trains their rows" if can_add else ""
            raise UserError(Problem("chat_template", found, expected, fix))
        return _named(name_or_file)
    if not os.path.isfile(name_or_file):  # Path.is_file() raises OSError if the name is too long for a file
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
    """The tokens that the named template needs and the tokenizer would split, or does not have."""
    missing = []
    for token in REQUIRED_TOKENS[name]:
        text = getattr(tokenizer, token) if token in ("bos_token", "eos_token") else token
        if text is None or not _is_one_token(tokenizer, text):
            missing.append(token)
    return missing


def _is_one_token(tokenizer: Any, text: str) -> bool:
    return len(tokenizer(text, add_special_tokens=False).input_ids) == 1


def fitting(tokenizer: Any, word: str = "") -> str:
    """Advice for a message: the named templates that fit the tokenizer, as flags, or to write a template file.

    A template fits if the tokenizer has its special tokens, and if ``word`` occurs in it.
    """
    names = [name for name in REQUIRED_TOKENS if word in _named(name) and not _missing_tokens(tokenizer, name)]
    return f"--chat_template {' | '.join(names)}, which fit this one" if names else "a template file of your own"


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
        return _OPEN + caller() + _CLOSE


class Template:
    """A chat template, compiled for a tokenizer. Methods that refuse a conversation raise ``UserError``.

    Attributes:
        source: the Jinja text.
        date_was_asked: whether a rendering has asked for the date since this was last set to False.

    Raises ``UserError`` if ``source`` does not compile.
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
        """The exception to raise for the reason ``found``. Names our templates that fit and contain ``word``."""
        if word not in self._fitting:
            self._fitting[word] = fitting(self._tokenizer, word)
        return UserError(Problem("chat_template", found, "a template that fits: " + self._fitting[word]))

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the template has ``{% generation %}`` blocks, which mark the text to learn from."""
        return bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source))

    @cached_property
    def split_literals(self) -> list[str]:
        """What looks like a special token in the template, but is split by the tokenizer."""
        if self.source in map(_named, REQUIRED_TOKENS):  # their special tokens are checked, the rest is plain text
            return []
        tree = self._compiled.environment.parse(self.source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        literals = {literal for text in texts for literal in _SPECIAL.findall(text)}
        return sorted(literal for literal in literals if not _is_one_token(self._tokenizer, literal))

    def render(self, messages: Messages, tools: Tools, add_generation_prompt: bool = False) -> str:
        """The conversation as text; with ``add_generation_prompt``, as the model is given it to write an answer.

        Raises ``UserError`` if the template fails.
        """
        return self._render(self._compiled, messages, tools, add_generation_prompt)

    def render_marked(self, messages: Messages, tools: Tools) -> tuple[str, list[Span]]:
        """The conversation as text, and the span of that text that each ``{% generation %}`` block gave.

        Raises ``UserError`` if the template fails, or if its blocks cannot be located.
        """
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
        """Raise ``UserError`` if the sample has tools, calls or reasoning and the template never reads such a key."""
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
        """Raise ``UserError`` if ``text``, the rendering, lacks a tool or the content of a message, in their order.

        Of an answer only the part after its reasoning must be there: many templates drop earlier reasoning.
        """
        if tools:
            without = self.render(messages, None)  # the name may also occur in a call of the tool
            for name in (tool.get("function", tool).get("name", "") for tool in tools):
                if text.count(name) <= without.count(name):
                    raise self.refusal(f"the template leaves out the tool {name!r}")
        at = 0
        for i, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "assistant":
                content = _THINK.split(content)[-1]
            forms = [content.strip()]
            start = 0 if message["role"] == "system" else at  # some templates put it after other messages
            if message["role"] == "tool":  # some templates write it as a JSON string
                forms += [json.dumps(forms[0], ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)]
            found = [(start_of_form, form) for form in forms if (start_of_form := text.find(form, start)) >= 0]
            if not found:
                raise self.refusal(f"messages[{i}]: the template leaves its text out, or changes it")
            if message["role"] != "system":
                start_of_form, form = min(found)
                at = start_of_form + len(form)

    def check_answer(self, text: str, message: dict[str, Any], i: int) -> None:
        """Raise ``UserError`` if ``text``, the rendering of an answer, lacks some of its content, reasoning or calls.

        ``i`` is the number of ``message`` in the conversation.
        """
        at = 0
        for part in [message.get("reasoning_content") or "", *_THINK.split(message["content"])]:
            at = text.find(part.strip(), at) + len(part.strip())
            if at < len(part.strip()):
                raise self.refusal(f"messages[{i}]: the template leaves part of the answer out, or changes it")
        at = 0
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
            at = text.find(name, at) + len(name)
            if at < len(name) or any(key not in text for key in arguments):
                raise self.refusal(f"messages[{i}]: the template leaves out the call of {name!r}, or part of it")
