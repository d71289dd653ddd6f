"""HTML pages in one file: no script, pictures inside, so they open in a browser without network."""

import html
import io
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib.figure import Figure

from kit.secrets import redacted

# Replaces control characters, which a terminal would interpret, by their escapes: \x1b. Tabs and line breaks stay.
VISIBLE = {code: repr(chr(code))[1:-1] for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
overflow-wrap: anywhere }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
p.line { color: #57606a; margin: .15rem 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1rem }
svg { width: 100%; height: auto } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left;
overflow-wrap: normal; vertical-align: top; padding: .25rem .75rem;
border-bottom: 1px solid #d0d7de } .scroll { overflow-x: auto }
"""


def page(title: str, parts: list[str], style: str = "") -> str:
    """Return an HTML document, without credentials.

    Args:
        title: as text, not HTML.
        parts: HTML of the body.
        style: CSS in addition to that of all pages.
    """
    head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>{escaped(title)}</title><style>{STYLE}{style}</style>"
    return redacted(f"{head}{''.join(parts)}</html>\n")


def escaped(text: str) -> str:
    """Return ``text`` as HTML, with its control characters made visible."""
    return html.escape(text.translate(VISIBLE))


def section(title: str, body: str) -> str:
    """Return a heading with ``body``, both HTML; a wide body can be scrolled."""
    return f"<h2>{title}</h2><div class=scroll>{body}</div>"


def table(columns: list[str], rows: list[dict[str, Any]]) -> str:
    """Return an HTML table of ``rows``, each a mapping from column to value."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_shown(row.get(name))}</td>' for name in columns)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def svg(figure: Figure) -> str:
    """Return a figure as SVG text for a page. Equal figures give equal text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    text = escaped(str(value))
    return f"<pre>{text}</pre>" if " " in text or "\n" in text else text
