"""A page is one file that holds text as text, whatever the text says."""

import base64
import hashlib
import re

from kit.tools.report.page import GENERATOR, SCRIPT, escaped, page, section, table


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
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert text.count("<script") == 1 and f"<script>{SCRIPT}</script>" in text and GENERATOR in text
    assert "</" not in SCRIPT and "<!--" not in SCRIPT, "the script can stand in a page"
