"""The website of the documentation: every page and every file that a page links to is in it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import ROOT

SITE = runpy.run_path(str(ROOT / "docs/site.py"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    SITE["stage"](folder)
    return folder


def test_all_pages_are_staged_and_their_links_lead_to_staged_files(pages):
    for page in [*pages.glob("docs/*.md"), pages / "README.md"]:
        for link in SITE["LINK"].findall(page.read_text()):
            assert (page.parent / link.partition("#")[0]).is_file(), f"{page.relative_to(pages)}: {link}"
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {path.name for path in (pages / "docs").iterdir()}


def test_a_file_of_code_becomes_a_page_that_shows_it(pages):
    assert "](recipes/finetune.py.md)" in (pages / "README.md").read_text()
    assert (ROOT / "recipes/finetune.py").read_text() in (pages / "recipes/finetune.py.md").read_text()


def test_the_navigation_names_every_page_of_docs_once():
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    named = [name for entry in yaml.safe_load(text)["nav"] for name in names_of(entry)]
    assert len(named) == len(set(named)) and all((ROOT / name).is_file() for name in named)
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(named)


def names_of(entry):
    """The files that an entry of the navigation names."""
    (value,) = entry.values()
    return [value] if isinstance(value, str) else [name for each in value for name in names_of(each)]


@pytest.mark.slow
def test_a_link_or_an_anchor_that_leads_nowhere_fails_the_build(pages, tmp_path):
    pytest.importorskip("zensical", reason="the extra docs is not installed; .ci/run builds the site")
    for link, status in (("README.md", 0), ("README.md#your-model-your-data", 0), ("README.md#no", 1), ("no.md", 1)):
        (tmp_path / "pages").mkdir(exist_ok=True)
        (tmp_path / "pages/README.md").write_text("# Start\n\n## Your model, your data\n")
        (tmp_path / "pages/page.md").write_text(f"# Page\n\n[link]({link})\n")
        settings = re.sub(r"^nav:\n( .*\n)+", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
        (tmp_path / "mkdocs.yml").write_text(settings)
        command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(tmp_path / "mkdocs.yml")]
        done = subprocess.run(command, cwd=Path(tmp_path), capture_output=True, text=True)
        assert bool(done.returncode) == bool(status), f"{link}: {done.stdout}{done.stderr}"
