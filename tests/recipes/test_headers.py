"""The table in a recipe's header is what the plan says now."""

import runpy
import sys

from kit.config.paths import RECIPES, ROOT


def test_the_headers_of_the_recipes_and_the_tables_of_the_pages_are_current(monkeypatch):
    """Else: python docs/recipe_headers.py"""
    monkeypatch.setattr("sys.path", [*sys.path])
    headers = runpy.run_path(str(ROOT / "docs/recipe_headers.py"))
    pages = headers["pages"]()
    assert {RECIPES / "llama-8b.yaml", ROOT / "docs/quickstart.md"} < pages.keys()
    assert [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text] == []
