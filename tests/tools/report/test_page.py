"""A page is one file that holds text as text, whatever the text says."""

import base64
import hashlib
import re

import pytest

from kit.errors import UserError
from kit.tools.report.page import GENERATOR, SCRIPT, choice, escaped, page, section, table, write_page


def test_text_stays_text_and_cannot_drive_a_terminal():
    assert escaped("<b>&'\"\x1b[2J\x9b\t\n") == "&lt;b&gt;&amp;&#x27;&quot;\\x1b[2J\\x9b\t\n"


def test_a_cell_shows_a_value_as_a_person_reads_it():
    cases = [
        (1234567, "1,234,567"),
        (0.123456789, "0.123457"),
        (True, "yes"),
        (False, "no"),
        ("<b>", "&lt;b&gt;"),
        (None, ""),
        ("two words", "two words"),
        ("a\nb", "<pre>a\nb</pre>"),
        ("a  b", "<pre>a  b</pre>"),
    ]
    for value, cell in cases:
        head = "<thead><tr><th scope=col>x&lt;y</th></tr></thead>"
        body = f"<tbody><tr><td data-name='x&lt;y'>{cell}</td></tr></tbody>"
        assert table(["x<y"], [{"x<y": value}]) == f"<table class=rows>{head}{body}</table>", (value, cell)


def test_a_page_is_whole_and_holds_no_credential(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "n0t-for-you")
    text = page("<title> n0t-for-you", [section("Data", "<p>n0t-for-you</p>")], "p { color: red }")
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
    assert "<title>&lt;title&gt; ***</title>" in text and "p { color: red }" in text
    assert "<h2>Data</h2><div class=scroll><p>***</p></div>" in text and "n0t" not in text


def test_a_page_runs_the_script_of_the_kit_and_no_other():
    text = page("title", ["<p>"])
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    [policy] = re.findall('http-equiv=Content-Security-Policy content="([^"]*)"', text)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert text.count("<script") == 1 and f"<script>{SCRIPT}</script>" in text and GENERATOR in text


def test_the_script_can_stand_in_a_page():
    assert "</" not in SCRIPT and "<!--" not in SCRIPT


def test_a_live_page_is_loaded_again_also_without_scripts():
    text = page("title", [], reload_seconds=2.5)
    assert "<html lang=en data-reload=2.5>" in text and "<noscript><meta http-equiv=refresh content=2>" in text
    assert "data-reload=" not in page("title", []) and "http-equiv=refresh" not in page("title", [])


def test_a_reader_can_choose_a_view_and_the_first_is_shown_unless_another_is_wanted():
    def checked(control):
        return re.findall("id=([a-z-]+) class=[a-z]+ checked", control)

    assert checked(page("title", [])) == ["theme-auto"]
    assert checked(choice("x", "x axis", ["step", "tokens"])) == ["x-step"]
    control = choice("y", "y axis", {"zero": "from 0", "log": "log"}, chosen="log")
    assert checked(control) == ["y-log"] and "<legend>y axis</legend>" in control and ">from 0</span>" in control


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    assert write_page(tmp_path / "a.html", "one") == tmp_path / "a.html"
    write_page(tmp_path / "a.html", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"] and (tmp_path / "a.html").read_text() == "two"
    with pytest.raises(UserError, match=r"b.html: cannot be written \(No such file or directory\)"):
        write_page(tmp_path / "absent/b.html", "one")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder: cannot be written"):
        write_page(tmp_path / "folder", "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "folder"]
