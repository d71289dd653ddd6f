"""Tables of cells (CSV, TSV) as rows.

Promises: what cannot be used becomes a ``Problem`` with its line, and reading continues after it; no part of a row that
is broken by a bad line or by quotes that do not match is taken for a row. Memory use does not grow with the size of the
file.
"""

import csv
from collections.abc import Iterator
from dataclasses import astuple

from kit.data.read.text import MAX_LINE_BYTES, NOT_UTF8, Bytes, Ending, Row, long_line, skip_line
from kit.errors import Problem

DELIMITERS = {".csv": ",", ".tsv": "\t"}
OTHERS = (";", "\t", ",", "|")  # Excel writes semicolons into a .csv where the comma is the decimal sign
UNNAMED = "Unnamed: {}"  # as pandas calls a column without a name, by its position
CARRIAGE_RETURNS = "its lines end in a carriage return alone"


def separator_of(line: bytes, usual: str) -> str:
    """What separates the cells of a table: the usual one, or another that makes several cells of its first line."""
    text = line.decode("utf-8-sig", errors="replace").rstrip("\r\n")
    return next((each for each in (usual, *OTHERS) if _num_cells(text, each) > 1), usual)


def _num_cells(text: str, delimiter: str) -> int:
    """The number of cells of one line; 0 if its quotes do not match."""
    try:
        return len(next(csv.reader([text], delimiter=delimiter, strict=True), []))
    except csv.Error:
        return 0


def csv_rows(reader: Bytes, name: str, delimiter: str) -> Iterator[Row]:
    """Parse a table of cells, quoted as in RFC 4180, whose first row names the columns.

    A row has the number of the line it begins on. If the first row cannot be used, no other rows follow. A column
    without a name, such as the index that pandas writes, is called ``Unnamed: 0`` by its position.
    """
    number = 0  # of the last line read
    text = ""  # of that line
    num_quotes = 0  # in the lines of its row
    bad: Problem | None = None  # of a line in the current row

    def next_line() -> str:
        nonlocal number, text, num_quotes, bad
        line = reader.readline(MAX_LINE_BYTES + 1)
        if not line or (reader.damage and not line.endswith(b"\n")):
            return ""
        number += 1
        quotes_in_line = line.count(b'"')
        num_quotes += quotes_in_line
        # A bad line may lie in a quoted cell of several lines. So its row is read to its end: the parser gets the
        # line in a form that opens and closes quotes as the line does.
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            bad = bad or long_line(f"{name}:{number}")
            quotes_in_line += skip_line(reader)
            return '"\n' if quotes_in_line % 2 else "\n"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            found = f"{NOT_UTF8} at byte {error.start + 1} of the line"
            bad = bad or Problem(f"{name}:{number}", found, "UTF-8 text")
            text = line.decode(errors="replace")
        return text

    csv.field_size_limit(MAX_LINE_BYTES)
    # iter(function, "") can continue after an exception, a generator cannot. Without strict, a quote that is never
    # closed would swallow the rest of the file.
    records = csv.reader(iter(next_line, ""), delimiter=delimiter, strict=True)
    header: list[str] = []
    broken_row = 0  # the line on which the row before begins, if its quotes do not match; else 0
    while True:
        start = number + 1
        num_quotes = 0
        bad = None
        where = f"{name}:{start}"
        problem: Problem | None = None
        broken_before = broken_row
        broken_row = 0
        try:
            cells = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            if reader.damage:
                continue
            broken_row = start
            found = f"not a row of cells ({error})"
            if number > start:
                found += f", lines {start} to {number}"
            problem = Problem(where, found, "quotes in pairs, inner ones doubled")
            if "new-line character" in str(error):
                problem = Problem(where, CARRIAGE_RETURNS, "lines that end in a line feed", "save it so")
            if "end of data" in str(error):  # a quote that is not closed has swallowed all other rows
                problem = Ending(*astuple(problem))
        else:
            if not bad and broken_before and num_quotes % 2:
                broken_row = broken_before
                problem = Problem(where, f"the rest of the row that begins on line {broken_before}", "quotes in pairs")
            elif not bad and not header:
                problem = _check_header(cells, where)
        problem = bad or problem
        if problem:
            problem_line = int(problem.where.rpartition(":")[2])
            if not header:
                yield problem_line, Ending(*astuple(problem))
                return
            yield problem_line, problem
        elif not header:
            header = _distinct([cell if cell.strip() else UNNAMED.format(i) for i, cell in enumerate(cells)])
        elif not cells:
            yield start, None
        elif len(cells) != len(header):
            expected = f"{len(header)}, as in the header; a cell that holds {delimiter!r} needs double quotes around it"
            yield start, Problem(where, f"{len(cells)} cells", expected)
        else:
            yield start, dict(zip(header, cells, strict=True))


def _check_header(cells: list[str], where: str) -> Problem | None:
    """The problem of a first row that does not name the columns, if there is one."""
    expected = "a first row with the names of the columns"
    num_named = sum(bool(cell.strip()) for cell in cells)
    if num_named < min(2, len(cells) - 1) or not num_named:
        found = f"{len(cells)} columns, of which {num_named or 'none'} has a name"
        fix = "take out the lines above the names of the columns, such as a title, or write the names"
        return Problem(where, found, expected, fix)
    names = [cell for cell in cells if cell.strip()]
    twice = [cell for i, cell in enumerate(names) if cell in names[:i]]
    if not twice:
        return None
    return Problem(where, f"two columns are called {twice[0]!r}", expected, "give each column a name of its own")


def _distinct(cells: list[str]) -> list[str]:
    """The names of columns, with a number behind one that is there already: ``answer``, ``answer_2``."""
    names: list[str] = []
    for cell in cells:
        more = (f"{cell}_{number}" for number in range(2, len(cells) + 2))
        names.append(cell if cell not in names else next(each for each in more if each not in [*cells, *names]))
    return names
