"""HTML pages in one file: style, script and pictures inside, so they open in a browser without network.

Promises: text of a run or of data stays text. A page runs no script but the kit's own, which the browser checks by its
hash, and loads nothing.
"""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.system import durable
from kit.system.credentials import redacted
from kit.system.errors import UserError
from kit.system.visible import visible

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("charts.js").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_POLICY = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"
_PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,100000}")
_MOST_PICTURES = 8  # in a cell
GENERATOR = "<meta name=generator content='kit report'>"  # a page with it is the kit's own, and may be overwritten


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML document with ``parts`` (HTML) under ``title`` (text), without credentials."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8>{GENERATOR}"
    head += f'<meta http-equiv=Content-Security-Policy content="{_POLICY}">'
    head += f"<meta name=viewport content='width=device-width'><title>{escaped(title)}</title><style>{STYLE}</style>"
    return redacted(f"{head}<main>{''.join(parts)}</main><script>{SCRIPT}</script></html>\n")


def write_page(path: Path, text: str) -> Path:
    """Replace the page at ``path`` atomically, and return ``path``. Raises ``UserError`` if it cannot be written."""
    try:
        durable.write_text(path, text)
    except OSError as error:
        raise UserError(str(path), f"cannot be written ({error.strerror})") from None
    return path


def escaped(text: str) -> str:
    """Return ``text`` as HTML, with its control characters made visible."""
    return html.escape(visible(text))


def section(title: str, body: str) -> str:
    """Return a heading with ``body`` (HTML), which can be scrolled if it is wide; empty without a body."""
    return f"<h2>{escaped(title)}</h2><div class=scroll>{body}</div>" if body else ""


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table, with a column for each key of the first row; empty without rows."""
    if not rows:
        return ""
    head = "".join(f"<th scope=col>{escaped(name)}</th>" for name in rows[0])
    cells = ("".join(f"<td data-name='{escaped(n)}'>{_content(row.get(n))}</td>" for n in rows[0]) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Pictures(list[str]):
    """Pictures of a cell, as data: URIs: of what a file says, those that are."""

    def __init__(self, given: Any) -> None:
        given = given if isinstance(given, list) else []
        super().__init__(each for each in given[:_MOST_PICTURES] if isinstance(each, str) and _PICTURE.fullmatch(each))


def _content(value: Any) -> str:
    if isinstance(value, Pictures):
        return "<div>" + "".join(f"<img src='{each}' alt=''>" for each in value) + "</div>"
    return escaped(cell(value))


def cell(value: Any) -> str:
    """Return a value as text that a person reads easily."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, list):
        return "; ".join(map(cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {cell(each)}" for key, each in value.items() if each not in (None, "", [], {}))
    return f"{value:,}" if isinstance(value, int) else str(value)
