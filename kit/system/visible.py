"""Untrusted text, safe to print: names, rows, templates, answers of a model, messages of libraries.

Promises: no character moves the cursor, or changes colours or the order of letters. None is lost: each is shown as its
escape, such as ``\\x1b``. No name starts a new line, so none can forge a message. Letters stay. Plain Python.
"""

import re
from collections.abc import Iterable

# Control characters but tab and line feed; line and paragraph separators; characters that turn the direction of text;
# the byte order mark, and halves of surrogate pairs, as which Python shows bytes of a file name that are no UTF-8.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


class Layout(str):
    """Text whose line breaks are the kit's own; ``one_line`` leaves them."""

    __slots__ = ()


def visible(text: str) -> str:
    """Return ``text`` with each character that a terminal would act on as its escape. Tabs and line breaks stay."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return ``visible(text)`` with its line breaks as escapes too, unless it is a ``Layout``."""
    shown = visible(text)
    return Layout(shown) if isinstance(text, Layout) else shown.replace("\n", "\\n")


def joined(lines: Iterable[str], separator: str = "\n") -> Layout:
    """Return ``lines``, each as one line, with ``separator`` between them."""
    return Layout(separator.join(map(one_line, lines)))
