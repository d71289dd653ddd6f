"""A page is one file that holds text as text, whatever the text says."""

import base64
import hashlib
import re

import pytest

from kit.errors import UserError
from kit.tools.report.page import GENERATOR, SCRIPT, escaped, page, section, table, write_page


def test_text_stays_text_and_cannot_drive_a_terminal():
    shown = "&lt;b&gt;&amp;&#x27;&quot;\\x1b[2J\\x9b\t\n"
    assert escaped("<b>&'\"\x1b[2J\x9b\t\n") == shown
    assert f"<td data-name='{shown}'>{shown}</td>" in table([{"<b>&'\"\x1b[2J\x9b\t\n": "<b>&'\"\x1b[2J\x9b\t\n"}])


def test_a_page_is_whole_and_holds_no_credential(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "n0t-for-you")
    text = page("<title> n0t-for-you", [section("Data", "<p>n0t-for-you</p>")])
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
    assert "<title>&lt;title&gt; ***</title>" in text
    assert "<h2>Data</h2><div class=scroll><p>***</p></div>" in text and "n0t" not in text


def test_a_page_runs_the_script_of_the_kit_and_no_other():
    text = page("title", ["<p>"])
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    [policy] = re.findall('http-equiv=Content-Security-Policy content="([^"]*)"', text)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert text.count("<script") == 1 and f"<script>{SCRIPT}</script>" in text and GENERATOR in text
    assert "</" not in SCRIPT and "<!--" not in SCRIPT, "the script can stand in a page"


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    for text in ("one", "two"):
        write_page(tmp_path / "a.html", text)
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"] and (tmp_path / "a.html").read_text() == "two"
    with pytest.raises(UserError, match=r"b.html: cannot be written \(No such file or directory\)"):
        write_page(tmp_path / "absent/b.html", "one")
