"""HTML pages in one file: style, script and pictures inside, so they open in a browser without network.

Promises: text of a run or of data stays text. A page runs no script but the kit's own, which the browser checks by its
hash, and loads nothing.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kit import durable
from kit.errors import Problem, UserError
from kit.secrets import redacted
from kit.visible import visible

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("charts.js").read_text(encoding="utf-8")
_THEMES = ("auto", "light", "dark")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"
GENERATOR = "<meta name=generator content='kit report'>"  # a page with it is the kit's own, and may be overwritten


def page(title: str, parts: Iterable[str], style: str = "", reload_seconds: float = 0) -> str:
    """Return an HTML document, without credentials.

    Args:
        title: as text, not HTML.
        parts: HTML of the body.
        style: CSS in addition to that of all pages.
        reload_seconds: the browser loads the page again after this time; 0: never.
    """
    reload = f" data-reload={reload_seconds:g}" if reload_seconds else ""
    # Without scripts, the browser loads the page again by itself.
    refresh = (
        f"<noscript><meta http-equiv=refresh content={max(round(reload_seconds), 1)}></noscript>" if reload else ""
    )
    head = f"<!doctype html><html lang=en{reload}><meta charset=utf-8>"
    head += f'<meta http-equiv=Content-Security-Policy content="{_POLICY}">{GENERATOR}{refresh}'
    head += "<meta name=viewport content='width=device-width'>"
    head += f"<title>{escaped(title)}</title><style>{STYLE}{style}</style>"
    return redacted(
        f"{head}<div class='theme screen'>{choice('theme', 'theme', _THEMES)}</div>"
        f"<main>{''.join(parts)}</main><script>{SCRIPT}</script></html>\n"
    )


def write_page(path: Path, text: str) -> Path:
    """Replace the page at ``path`` atomically, and return ``path``. Raises ``UserError`` if it cannot be written."""
    try:
        durable.write_text(path, text)
    except OSError as error:
        raise UserError(Problem(str(path), f"cannot be written ({error.strerror})")) from None
    return path


def escaped(text: str) -> str:
    """Return ``text`` as HTML, with its control characters made visible."""
    return html.escape(visible(text))


def choice(name: str, legend: str, words: Iterable[str] | Mapping[str, str], chosen: str = "") -> str:
    """Return a control with which a reader chooses one of several views.

    Args:
        name: of the control, once on a page.
        words: of the views, in one word each, which is the class of its input; or a mapping from such words to others.
        chosen: the view at first; default: the first.
    """
    named = words if isinstance(words, Mapping) else {word: word for word in words}
    chosen = chosen or next(iter(named))
    options = "".join(
        f"<label><input type=radio name={name} id={name}-{word} class={word}{' checked' if word == chosen else ''}>"
        f"<span>{text}</span></label>"
        for word, text in named.items()
    )
    return f"<fieldset class=choice><legend>{legend}</legend>{options}</fieldset>"


def section(title: str, body: str) -> str:
    """Return a heading with ``body``, both HTML; a wide body can be scrolled."""
    return f"<h2>{title}</h2><div class=scroll>{body}</div>"


def table(columns: list[str], rows: list[dict[str, Any]], stacks: bool = True) -> str:
    """Return an HTML table.

    Args:
        rows: each a mapping from column to value; a value that a row lacks is empty.
        stacks: on a narrow screen, each row becomes a block with a line for each value. Without it, the columns must
            be few and their values short.
    """
    head = "".join(f"<th scope=col>{escaped(name)}</th>" for name in columns)
    cells = (
        "".join(f"<td data-name='{escaped(name)}'>{_shown(row.get(name))}</td>" for name in columns) for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table{' class=rows' if stacks else ''}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    text = escaped(str(value))
    return f"<pre>{text}</pre>" if any(space in text for space in ("\n", "\t", "  ")) else text
