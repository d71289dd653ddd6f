"""Write a Modelfile, with which Ollama renders conversations as the model was trained on them.

Ollama takes Go templates. A chat template that puts a text before and after each message, by its role, is written as
one; the texts are found by rendering conversations, so that Jinja need not be read.

Promises: the Go template gives the text of the chat template for each conversation that was tried, or there is none.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kit.data.chat.template import Template
from kit.errors import Problem, UserError

_ROLES = ("system", "user", "assistant")
_SHAPES = ("u", "su", "uau", "suau", "uauau")  # of conversations, by the first letters of their roles


@dataclass(frozen=True)
class Frame:
    """The texts around messages."""

    start: str  # of a conversation with a system message
    bare_start: str  # of one without
    around: dict[str, tuple[str, str]]  # by role, before and after the content
    prompt: str  # after the last message: the model answers then

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the conversation as the Go template writes it."""
        text = self.start if messages[0]["role"] == "system" else self.bare_start
        for message in messages:
            before, after = self.around[message["role"]]
            text += before + message["content"] + after
        return text + self.prompt

    def go(self) -> str:
        """Return the Go template."""
        text = _literal(self.start)
        if self.start != self.bare_start:
            text = f"{{{{ if .System }}}}{text}{{{{ else }}}}{_literal(self.bare_start)}{{{{ end }}}}"
        text += "{{ range .Messages }}"
        roles = [role for role in _ROLES if role in self.around]
        for i, role in enumerate(roles):
            before, after = map(_literal, self.around[role])
            text += f'{{{{ {"else if" if i else "if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        return f"{text}{{{{ end }}}}{{{{ end }}}}{_literal(self.prompt)}"


def find_frame(template: Template) -> Frame:
    """Find the texts that ``template`` puts around messages.

    Raises:
        UserError: it writes more than that.
    """
    frame = None
    with suppress(UserError, ValueError):
        frame = _find(template)
    takes_system = frame is not None and "system" in frame.around
    for shape in _SHAPES:
        messages = _conversation(shape)
        if "s" in shape and not takes_system:
            continue
        if frame is None or frame.render(messages) != template.render(messages, None, add_generation_prompt=True):
            found = "the chat template is more than a text before and after each message, so Ollama has no equal of it"
            fix = "leave it out, and serve the GGUF file by `llama-server --jinja -m FILE`, which reads the template"
            raise UserError(Problem("--ollama", found, fix=fix))
    assert frame is not None
    return frame


def _find(template: Template) -> Frame:
    def render(shape: str, prompt: bool = False) -> str:
        return template.render(_conversation(shape), None, add_generation_prompt=prompt)

    def parts(text: str, *contents: str) -> list[str]:
        found = []
        for content in contents:
            before, sep, text = text.partition(content)
            if not sep:
                raise ValueError
            found.append(before)
        return [*found, text]

    alone, asked = render("u"), render("u", prompt=True)
    if not asked.startswith(alone):
        raise ValueError
    head, user_after = parts(alone, _content(0, "u"))
    _, between, assistant_after = parts(render("ua"), _content(0, "u"), _content(1, "a"))
    if not between.startswith(user_after):
        raise ValueError
    user_before = parts(render("uau"), _content(0, "u"), _content(1, "a"), _content(2, "u"))[2]
    if not user_before.startswith(assistant_after):
        raise ValueError
    user_before = user_before.removeprefix(assistant_after)
    if not head.endswith(user_before):
        raise ValueError
    bare_start = start = head.removesuffix(user_before)
    around = {"user": (user_before, user_after), "assistant": (between.removeprefix(user_after), assistant_after)}
    with suppress(UserError, ValueError):
        system_head, middle, _ = parts(render("su"), _content(0, "s"), _content(1, "u"))
        if not middle.endswith(user_before):
            raise ValueError
        if not system_head.startswith(start):  # without a system message, the template writes one of its own
            start = ""
        around["system"] = (system_head.removeprefix(start), middle.removesuffix(user_before))
    return Frame(start, bare_start, around, asked.removeprefix(alone))


def _conversation(shape: str) -> list[dict[str, str]]:
    roles = {role[0]: role for role in _ROLES}
    return [{"role": roles[letter], "content": _content(i, letter)} for i, letter in enumerate(shape)]


def _content(number: int, letter: str) -> str:
    return f"probe {letter}{number} text"


def _literal(text: str) -> str:
    """Text in which Go finds no action."""
    return text.replace("{{", '{{ "{{" }}')


def modelfile(file: str, frame: Frame | None, stops: Sequence[str], system: str | None, bos: str | None) -> str:
    """Return the Modelfile.

    Args:
        file: name of the GGUF file beside it.
        frame: None: the model knows no conversations, only text that goes on.
        stops: the tokens that end answers.
        system: the system message of conversations that have none.
        bos: the token that Ollama puts before each prompt; None: none.

    Raises:
        UserError: a text cannot stand in a Modelfile.
    """
    template = "{{ .Prompt }}" if frame is None else frame.go()
    if bos and frame is not None:
        begins = {frame.start, frame.bare_start}
        if any(text and not text.startswith(bos) for text in begins) and begins != {""}:
            raise UserError(Problem("--ollama", f"Ollama begins each prompt with {bos}, and the template does not"))
        starts = (frame.start.removeprefix(bos), frame.bare_start.removeprefix(bos))
        template = Frame(*starts, frame.around, frame.prompt).go()
    for text in [template, *stops, system or ""]:
        if '"""' in text:
            found = 'three quotation marks (""") in the template, a stop token or the system message'
            raise UserError(Problem("--ollama", found, "a text without them", "leave out --ollama"))
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    lines += [f'SYSTEM """{system}"""'] if system else []
    lines += [f'PARAMETER stop """{stop}"""' for stop in stops]
    return "\n".join(lines) + "\n"


def stop_tokens(tokenizer: Any, eos_token_id: Any) -> list[str]:
    """Return the texts of the tokens at which the model stops: those of its generation settings and EOS."""
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    ids = [i for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]
