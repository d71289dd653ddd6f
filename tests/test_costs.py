"""The table of what each promise costs names modules that exist, and is in the page."""

import runpy

from helpers import ROOT

COSTS = runpy.run_path(str(ROOT / "docs/costs.py"))
ROWS, files = COSTS["ROWS"], COSTS["files"]


def test_the_table_names_modules_that_exist():
    assert [name for row in ROWS for name in row.modules.split() if not files(name)] == []


def test_no_module_counts_twice():
    counted = [file for row in ROWS for name in row.modules.split() for file in files(name)]
    assert len(counted) == len(set(counted))


def test_the_page_has_each_promise():
    page = (ROOT / "docs/architecture.md").read_text()
    assert [row.promise for row in ROWS if f"| {row.promise} |" not in page] == []
