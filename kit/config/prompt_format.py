"""The prompt of a row with an instruction and an input (Alpaca style): ``prompt_format`` of a dataset. Pure.

The form is ``{instruction}[ with {input}]``. What stands in square brackets is written only where a row has an input.
Doubled brackets and braces (``[[``, ``}}``) stand for single ones.

Promise: texts of rows are put in as they are; what looks like a placeholder in them stays.
"""

import re
from functools import cache

FORM = 'text with {instruction}, and {input} in square brackets: "{instruction}[\\n{input}]"'

_PARTS = re.compile(r"\[\[|\]\]|\{\{|\}\}|\[|\]|\{\w*\}|[^][{}]+|.")
_DOUBLED = {"[[": "[", "]]": "]", "{{": "{", "}}": "}"}


def checked_format(text: str) -> str:
    """Validate a format and return it. Raises ``ValueError`` with what is wrong."""
    is_optional, names = False, set()
    for part in _PARTS.findall(text):
        if part in ("[", "]"):
            if is_optional is (part == "["):
                raise ValueError(f"a single {part}")
            is_optional = part == "["
        elif part[0] in "{}" and part not in _DOUBLED:
            if part != ("{input}" if is_optional else "{instruction}"):
                raise ValueError(f"{part} {'within' if is_optional else 'outside'} square brackets")
            names.add(part)
    if is_optional:
        raise ValueError("a single [")
    if "{instruction}" not in names:
        raise ValueError("no {instruction}")
    if "\\n" in text:
        raise ValueError("\\n as two characters, which YAML reads as a line break only in double quotes")
    return text


@cache
def _parts(text: str) -> list[tuple[str, bool]]:
    """The parts of a format, and whether each is written only with an input."""
    parts, is_optional = [], False
    for part in _PARTS.findall(text):
        if part in ("[", "]"):
            is_optional = part == "["
        else:
            parts.append((_DOUBLED.get(part, part), is_optional))
    return parts


def question(text: str, instruction: str, more: str) -> str:
    """Return the prompt of a row in the format ``text``. ``more``: its input; empty if there is none."""
    values = {"{instruction}": instruction, "{input}": more}
    return "".join(values.get(part, part) for part, is_optional in _parts(text) if more or not is_optional)


def reads_input(text: str) -> bool:
    """Whether a format has a place for the input."""
    return ("{input}", True) in _parts(text)
