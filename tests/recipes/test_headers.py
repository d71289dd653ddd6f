"""The table in a recipe's header is what the plan says now, and shows machines that the recipe fits."""

import runpy
import sys

from kit.config.recipe import RECIPES, ROOT
from kit.tools.plan.hardware import GPUS


def test_the_headers_of_the_recipes_and_the_tables_of_the_pages_are_current(monkeypatch):
    """Else: python docs/recipe_headers.py"""
    monkeypatch.setattr("sys.path", [*sys.path])
    headers = runpy.run_path(str(ROOT / "docs/recipe_headers.py"))
    pages = headers["pages"]()
    assert {RECIPES / "llama-8b.yaml", ROOT / "docs/questions.md"} < pages.keys()
    assert [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text] == []
    for name, (recipe, shape) in headers["recipes"]().items():  # a machine that is no larger than it must be
        row = headers["row"](recipe, shape)
        key = next(m[0] for m in headers["MACHINES"] if f"{m[2]} x {m[1]}" in row.machine)
        share = row.option.memory.peak / GPUS[key].memory
        offloads = row.option.workload.strategy.offloads
        assert share <= 0.95 and (share > 0.5 or key == headers["MACHINES"][0][0] or offloads), name
