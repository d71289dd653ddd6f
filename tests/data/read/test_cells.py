"""Tables of cells: each row as it is meant, and what is broken reported with its line."""

from data_helpers import contents, problems, refused, rows_of, source_of

from kit.data.read import cells
from kit.data.read.text import Ending


def test_cells_may_hold_delimiters_quotes_lines_and_nul(folder):
    (folder / "a.csv").write_bytes(b'q,a\n"1, 2","say ""hi""\nthere"\n\n 3 ,\n5" pipe,a\x00b\n')
    assert rows_of(source_of("a.csv")) == [
        (2, {"q": "1, 2", "a": 'say "hi"\nthere'}),
        (4, None),
        (5, {"q": " 3 ", "a": ""}),
        (6, {"q": '5" pipe', "a": "a\x00b"}),
    ]


def test_a_bad_row_of_cells_is_named_and_reading_goes_on(folder):
    for content, message in (
        (b"1,2,3", "a.csv:3: 3 cells; expected 2, as in the header"),
        (b"1", "a.csv:3: 1 cells; expected 2, as in the header"),
    ):
        (folder / "a.csv").write_bytes(b"q,a\n1,2\n" + content + b"\n3,4\n")
        (reported,) = problems(source_of("a.csv"))
        assert reported.startswith(message)
        good = [row for row in contents(source_of("a.csv")) if isinstance(row, dict)]
        assert good == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]


def test_where_a_row_cannot_be_read_the_table_ends_and_no_part_of_it_is_taken_for_a_row(folder, monkeypatch):
    monkeypatch.setattr(cells, "MAX_LINE_BYTES", 100)
    for content, message in (
        (b'3,"4\n5,6\n', "a.csv:3: not a row of cells (unexpected end of data), lines 3 to 4"),
        (b'"one\ntwo"three\nfour",five\n5,6\n', "a.csv:3: not a row of cells ("),
        (b'1,"' + b"x" * 200 + b'"\n5,6\n', "a.csv:3: not a row of cells (a line of more than"),
        (b'3,"one\n\xff two\nthree, four"', "a.csv:4: not UTF-8 at byte 1 of the line"),
    ):
        (folder / "a.csv").write_bytes(b"q,a\n1,2\n" + content)
        first, last = contents(source_of("a.csv"))
        assert first == {"q": "1", "a": "2"} and isinstance(last, Ending)
        assert str(last).startswith(message)


def test_a_header_that_cannot_be_used_is_refused_and_no_other_row_taken_for_it(folder):
    for header, message in (
        (b"q,a,q", "a.csv:1: two columns are called 'q'"),
        (b"q\xff,a", "a.csv:1: not UTF-8"),
        (b'"q"x,a', "a.csv:1: not a row of cells"),
    ):
        (folder / "a.csv").write_bytes(header + b"\n1,2,3\n")
        assert message in refused("a.csv")


def test_a_column_without_a_name_is_called_as_pandas_calls_it(folder):
    (folder / "a.csv").write_text(",q,a,\n0,1,2,\n1,3,4,\n")
    assert contents(source_of("a.csv"))[0] == {"Unnamed: 0": "0", "q": "1", "a": "2", "Unnamed: 3": ""}
