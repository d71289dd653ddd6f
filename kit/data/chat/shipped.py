"""The kit's own chat templates, for base models: one file each in ``templates/``.

Promises:

- The first line of a template, its header, names the tokens that a tokenizer must have for it:
  ``{#- tokens: bos_token, <|im_end|> -#}``. No other list names the templates or their tokens.
- The header is not part of the template: it is neither saved with a model nor does it enter the fingerprint of data.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"

_HEADER = re.compile(r"\A\{#- tokens: (.+) -#\}\n")


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


def without_header(text: str) -> str:
    """Return the content of a template's file without the header, if it has one."""
    return _HEADER.sub("", text)


def _read(path: Path) -> ShippedTemplate:
    text = path.read_text(encoding="utf-8")
    header = _HEADER.match(text)
    assert header is not None, f"{path}: the first line must name its tokens: {{#- tokens: eos_token, <|end|> -#}}"
    return ShippedTemplate(without_header(text), tuple(header[1].split(", ")))


SHIPPED = {path.stem: _read(path) for path in sorted(TEMPLATES.glob("*.jinja"))}  # by name, in alphabetical order


def is_one_token(tokenizer: Any, text: str) -> bool:
    """Whether ``text`` is a single token of the tokenizer."""
    return len(tokenizer(text, add_special_tokens=False).input_ids) == 1


def fitting(tokenizer: Any) -> list[str]:
    """Return the names of the templates whose tokens the tokenizer has."""
    return [name for name, template in SHIPPED.items() if not template.missing_tokens(tokenizer)]
