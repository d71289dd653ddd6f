"""The navigation of the website; ``.ci/run`` builds it, and fails for a link or an anchor that leads nowhere."""

import re

from helpers import ROOT


def test_the_navigation_names_every_page_of_docs_once():
    named = re.findall(r"\S+\.(?:md|py|ipynb)\b", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2])
    pages = [name for name in named if name.endswith(".md")]
    assert len(pages) == len(set(pages)) and all((ROOT / name).is_file() for name in pages)
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(pages)
