"""The kit's own chat templates, for base models: one file each in ``templates/``.

Promises:

- The first line of a template, its header, names the tokens that a tokenizer must have for it:
  ``{#- tokens: bos_token, <|im_end|> -#}``. No other list names the templates or their tokens.
- The header is not part of the template: it is neither saved with a model nor does it enter the fingerprint of data.
"""

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"

_HEADER = re.compile(r"\{#- tokens: (.+) -#\}\n")


@dataclass(frozen=True, slots=True)
class ShippedTemplate:
    """A template of the kit.

    Attributes:
        source: its Jinja text.
        tokens: what a tokenizer must have as single tokens. ``bos_token`` and ``eos_token`` stand for the tokenizer's.
    """

    source: str
    tokens: tuple[str, ...]

    def missing_tokens(self, tokenizer: Any) -> list[str]:
        """Return those of ``tokens`` that the tokenizer does not have, or would split."""
        missing = []
        for token in self.tokens:
            text = getattr(tokenizer, token) if token in ("bos_token", "eos_token") else token
            if text is None or not is_one_token(tokenizer, text):
                missing.append(token)
        return missing


def parse_template(text: str, name: str) -> ShippedTemplate:
    """Return the template in ``text``, the content of its file. Raises ``ValueError`` if it has no header."""
    header = _HEADER.match(text)
    if header is None:
        raise ValueError(f"{name}: the first line must name its tokens: {{#- tokens: eos_token, <|end|> -#}}")
    return ShippedTemplate(text[header.end() :], tuple(header[1].split(", ")))


def without_header(text: str) -> str:
    """Return the content of a template's file without the header, if it has one."""
    header = _HEADER.match(text)
    return text[header.end() :] if header else text


def _shipped() -> dict[str, ShippedTemplate]:
    paths = sorted(TEMPLATES.glob("*.jinja"))
    return {path.stem: parse_template(path.read_text(encoding="utf-8"), str(path)) for path in paths}


SHIPPED = _shipped()  # by name, in alphabetical order


def is_one_token(tokenizer: Any, text: str) -> bool:
    """Whether ``text`` is a single token of the tokenizer."""
    return len(tokenizer(text, add_special_tokens=False).input_ids) == 1


def can_be_added(tokenizer: Any, tokens: Collection[str]) -> bool:
    """Whether ``--new_tokens`` can add missing tokens.

    A BOS or EOS has a role, which only the tokenizer gives it; and not every adapter trains rows of new tokens.
    """
    return getattr(tokenizer, "takes_new_tokens", True) and not {"bos_token", "eos_token"}.intersection(tokens)


def new_tokens_flag(tokenizer: Any, tokens: Sequence[str]) -> str:
    """Return the flag that adds these tokens, besides those that the recipe has added already."""
    given = getattr(tokenizer, "tokens_of_recipe", [])
    return f"--new_tokens {shlex.quote(','.join([*given, *tokens]))}"


def with_chat_template(tokenizer: Any, variable: str) -> str:
    """Return the flag for a shipped template that reads ``variable``, such as tools; one that fits, if there is one."""
    known = {name: one.missing_tokens(tokenizer) for name, one in SHIPPED.items() if variable in one.source}
    for name, missing in sorted(known.items(), key=lambda item: bool(item[1])):
        if not missing:
            return f"--chat_template {name}"
        if can_be_added(tokenizer, missing):
            return f"--chat_template {name} {new_tokens_flag(tokenizer, missing)}"
    return "the file of a chat template that reads them, as --chat_template,"


def fitting(tokenizer: Any) -> str:
    """Return advice for a message: the shipped templates whose tokens the tokenizer has, or to write a file."""
    names = [name for name, template in SHIPPED.items() if not template.missing_tokens(tokenizer)]
    if not names:
        return "a template file of your own"
    return f"--chat_template {' | '.join(names)}, which fit this one"
