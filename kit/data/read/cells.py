"""Tables of cells (CSV, TSV) as rows.

Promises: what cannot be used becomes a ``Problem`` with its line, and no part of a row that is broken is taken for a
row. Where quotes do not match, nobody knows where the next row begins, so the table ends there. Memory use does not
grow with the size of the file.
"""

import csv
from collections.abc import Iterator
from dataclasses import astuple

from kit.data.read.text import MAX_LINE_BYTES, NOT_UTF8, Bytes, Ending, Row, long_line
from kit.errors import Problem

DELIMITERS = {".csv": ",", ".tsv": "\t"}
UNNAMED = "Unnamed: {}"  # as pandas calls a column without a name, by its position


def csv_rows(reader: Bytes, name: str, delimiter: str) -> Iterator[Row]:
    """Parse a table of cells, quoted as in RFC 4180, whose first row names the columns.

    A row has the number of the line it begins on. If the first row cannot be used, no other rows follow.
    """
    number = 0  # of the last line read
    bad: Problem | None = None  # of a line in the current row

    def next_line() -> str:
        nonlocal number, bad
        line = reader.readline(MAX_LINE_BYTES + 1)
        if not line or (reader.damage and not line.endswith(b"\n")):
            return ""
        number += 1
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise csv.Error(long_line("").found)
        encoding = "utf-8-sig" if number == 1 else "utf-8"
        try:
            return line.decode(encoding)
        except UnicodeDecodeError as error:
            found = f"{NOT_UTF8} at byte {error.start + 1} of the line"
            bad = bad or Problem(f"{name}:{number}", found, "UTF-8 text")
            return line.decode(encoding, errors="replace")  # the row may go on behind it

    csv.field_size_limit(MAX_LINE_BYTES)
    records = csv.reader(iter(next_line, ""), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        start, bad = number + 1, None
        where = f"{name}:{start}"
        try:
            cells = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            if not reader.damage:
                found = f"not a row of cells ({error}), lines {start} to {number}"
                yield (
                    start,
                    Ending(where, found, "quotes in pairs, inner ones doubled, and lines that end in a line feed"),
                )
            return
        problem = bad
        if not header:
            header = [cell if cell.strip() else UNNAMED.format(i) for i, cell in enumerate(cells)]
            if twice := [cell for i, cell in enumerate(header) if cell in header[:i]]:
                problem = problem or Problem(where, f"two columns are called {twice[0]!r}", "a name for each column")
            if problem or not cells:
                yield start, Ending(*astuple(problem or Problem(where, "blank", "the names of the columns")))
                return
        elif problem:
            yield start, problem
        elif not cells:
            yield start, None
        elif len(cells) != len(header):
            expected = f"{len(header)}, as in the header; a cell that holds {delimiter!r} needs double quotes around it"
            yield start, Problem(where, f"{len(cells)} cells", expected)
        else:
            yield start, dict(zip(header, cells, strict=True))
