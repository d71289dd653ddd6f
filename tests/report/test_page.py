"""A page is one file that holds text as text, whatever the text says."""

import pytest
from matplotlib.figure import Figure

from kit.report.page import escaped, page, section, svg, table


def test_text_stays_text_and_cannot_drive_a_terminal():
    assert escaped("<b>&'\"\x1b[2J\x9b\t\n") == "&lt;b&gt;&amp;&#x27;&quot;\\x1b[2J\\x9b\t\n"


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (1234567, "1,234,567"),
        (0.123456789, "0.123457"),
        (True, "yes"),
        (False, "no"),
        ("<b>", "&lt;b&gt;"),
        ("two words", "<pre>two words</pre>"),
        ("a\nb", "<pre>a\nb</pre>"),
    ],
)
def test_a_cell_shows_a_value_as_a_person_reads_it(value, cell):
    assert table(["x<y"], [{"x<y": value}]) == f"<table><tr><th>x&lt;y</th></tr><tr><td>{cell}</td></tr></table>"


def test_a_page_is_whole_and_holds_no_credential(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "n0t-for-you")
    text = page("<title> n0t-for-you", [section("Data", "<p>n0t-for-you</p>")], "p { color: red }")
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
    assert "<title>&lt;title&gt; ***</title>" in text and "p { color: red }" in text
    assert "<h2>Data</h2><div class=scroll><p>***</p></div>" in text and "n0t" not in text


def test_a_picture_is_inside_the_page_and_has_no_date():
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2], [3, 4])
    picture = svg(figure)
    assert picture.startswith("<svg") and picture.rstrip().endswith("</svg>")
    assert "<?xml" not in picture and "dc:date" not in picture
