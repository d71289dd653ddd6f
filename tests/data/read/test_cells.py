"""Tables of cells: each row as it is meant, and what is broken reported with its line."""

import pytest
from data_helpers import contents, problems, refused, rows_of, source_of

from kit.data.read import cells
from kit.data.read.text import Ending
from kit.errors import Problem


def test_cells_may_hold_delimiters_quotes_and_lines(folder):
    (folder / "a.csv").write_bytes(b'q,a\n"1, 2","say ""hi""\nthere"\n\n 3 ,\n')
    assert rows_of(source_of("a.csv")) == [
        (2, {"q": "1, 2", "a": 'say "hi"\nthere'}),
        (4, None),
        (5, {"q": " 3 ", "a": ""}),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1,2,3", "a.csv:3: 3 cells; expected 2, as in the header"),
        (b"1", "a.csv:3: 1 cells; expected 2, as in the header"),
        (b"\xff,2", "a.csv:3: not UTF-8 at byte 1 of the line"),
        (b'"1"x,2', "a.csv:3: not a row of cells"),
    ],
)
def test_a_bad_row_of_cells_is_named(content, message, folder):
    (folder / "a.csv").write_bytes(b"q,a\n1,2\n" + content + b"\n3,4\n")
    source = source_of("a.csv")
    (reported,) = problems(source)
    assert reported.startswith(message)
    assert [row for row in contents(source) if isinstance(row, dict)] == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]


def test_a_quote_that_is_not_closed_is_reported_and_the_rest_is_not_read_as_one_cell(folder):
    (folder / "a.csv").write_bytes(b'q,a\n1,2\n3,"4\n5,6\n')
    assert contents(source_of("a.csv"))[0] == {"q": "1", "a": "2"}
    assert problems(source_of("a.csv"))[0].startswith("a.csv:3: not a row of cells (unexpected end of data)")


def test_a_nul_is_no_reason_to_fail(folder):
    (folder / "a.csv").write_bytes(b"q\na\x00b\n")
    assert contents(source_of("a.csv")) == [{"q": "a\x00b"}]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            b"My table,,",
            "a.csv:1: 3 columns, of which 1 has a name; expected a first row with the names of the columns",
        ),
        (b",,", "a.csv:1: 3 columns, of which none has a name"),
        (b"q,a,q", "a.csv:1: two columns are called 'q'"),
    ],
)
def test_a_header_that_names_no_columns_is_refused(header, message, folder):
    (folder / "a.csv").write_bytes(header + b"\n1,2,3\n")
    assert message in refused("a.csv")


@pytest.mark.parametrize("content", ["q;a\n1;2\n", "q;a\n1,0;2,5\n", '"q";"a"\n"1";"2"\n'])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_cells_separated_by_semicolons_are_read_and_this_is_noted(name, content, folder):
    (folder / name).write_text(content)
    source = source_of(name)
    (row,) = contents(source)
    assert list(row) == ["q", "a"] and list(row.values()) in (["1", "2"], ["1,0", "2,5"])
    assert source.notes == (f"{name}: its cells are separated by ';'",)


@pytest.mark.parametrize("header", ["text", "a, b", '"a;b"', '"a', "a;b,c"])
def test_the_usual_separator_stays_where_it_makes_several_cells_or_no_other_one_does(header):
    assert cells.separator_of(header.encode(), ",") == ","
    assert cells.separator_of(b"\xef\xbb\xbfq|a\r\n", ",") == "|"


def test_a_column_without_a_name_is_called_as_pandas_calls_it(folder):
    (folder / "a.csv").write_text(",q,a,\n0,1,2,\n1,3,4,\n")
    assert contents(source_of("a.csv"))[0] == {"Unnamed: 0": "0", "q": "1", "a": "2", "Unnamed: 3": ""}
    (folder / "a.csv").write_text(",Unnamed: 0,q,a\n0,1,2,3\n")
    assert list(contents(source_of("a.csv"))[0].values()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("header", [b"q\xff,a", b'"q"x,a'])
def test_no_other_row_is_taken_for_a_header_that_cannot_be_read(header, folder):
    (folder / "a.csv").write_bytes(header + b"\n1,2\n3,4\n")
    assert refused("a.csv").startswith("error: a.csv:1: not ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'3,"one\n\xff two\nthree, four"', "a.csv:4: not UTF-8 at byte 1 of the line"),
        (b'3,"one\n\xff"" two\nthree"', "a.csv:4: not UTF-8 at byte 1 of the line"),
        (b'3,"\xff one\ntwo, three"', "a.csv:3: not UTF-8 at byte 4 of the line"),
        (b'"one\ntwo"three\nfour",five', "a.csv:3: not a row of cells (',' expected after '\"'), lines 3 to 4"),
    ],
)
def test_no_part_of_a_broken_row_of_several_lines_is_taken_for_a_row(content, message, folder):
    (folder / "a.csv").write_bytes(b"q,a\n1,2\n" + content + b"\n5,6\n")
    source = source_of("a.csv")
    assert problems(source)[0].startswith(message)
    assert [row for row in contents(source) if isinstance(row, dict)] == [{"q": "1", "a": "2"}, {"q": "5", "a": "6"}]
    for problem in problems(source)[1:]:
        assert "the rest of the row that begins on line 3" in problem


@pytest.mark.parametrize("quote", [b"", b'"'])
def test_a_line_that_is_too_long_in_a_cell_of_several_lines_breaks_one_row(quote, folder, monkeypatch):
    monkeypatch.setattr(cells, "MAX_LINE_BYTES", 100)
    long = b"x" * 200 + quote
    rest = b"" if quote else b'three, four"\n'
    (folder / "a.csv").write_bytes(b'q,a\n1,"one\n' + long + b"\n" + rest + b"5,6\n")
    source = source_of("a.csv")
    assert [reported.split(";")[0] for reported in problems(source)] == ["a.csv:3: a line of more than 16 MiB"]
    assert [row for row in contents(source) if isinstance(row, dict)] == [{"q": "5", "a": "6"}]


def test_a_stray_quote_in_a_cell_is_part_of_it_where_nothing_is_broken(folder):
    (folder / "a.csv").write_bytes(b'q,a\n5" pipe,3\n')
    assert contents(source_of("a.csv")) == [{"q": '5" pipe', "a": "3"}]


def test_rows_that_an_open_quote_swallowed_cannot_be_skipped(folder):
    (folder / "a.csv").write_bytes(b'q,a\n1,2\n3,"4\n5,6\n')
    (problem,) = [row for row in contents(source_of("a.csv")) if isinstance(row, Problem)]
    assert isinstance(problem, Ending) and "lines 3 to 4" in problem.found
