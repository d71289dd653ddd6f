"""Tables of cells (CSV, TSV) as rows.

Promises: what cannot be used becomes a ``Problem`` with its line, and no part of a row that is broken is taken for a
row. Where quotes do not match, or a line is no text, nobody knows where the next row begins: the table ends there.
Memory use does not grow with the size of the file.
"""

import csv
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from kit.data.read.text import MAX_LINE_BYTES, Ending, Row, decoded, long_line, reason
from kit.system.errors import Problem

DELIMITERS = {".csv": ",", ".tsv": "\t"}
UNNAMED = "Unnamed: {}"  # as pandas calls a column without a name, by its position
QUOTES = "quotes in pairs, inner ones doubled, and lines that end in a line feed"


def csv_rows(file: BinaryIO, name: str, delimiter: str) -> Iterator[Row]:
    """Parse a table of cells, quoted as in RFC 4180, whose first row names the columns.

    A row has the number of the line it begins on. If the first row cannot be used, no other rows follow.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    records = csv.reader(_lines(file), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        start = records.line_num + 1
        where = f"{name}:{start}"
        try:
            cells = next(records)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            yield start, Ending(f"{name}:{records.line_num + 1}", *reason(error))
            return
        except csv.Error as error:
            yield start, Ending(where, f"not a row of cells ({error}), lines {start} to {records.line_num}", QUOTES)
            return
        if not header:
            header = [cell if cell.strip() else UNNAMED.format(i) for i, cell in enumerate(cells)]
            twice = [cell for i, cell in enumerate(header) if cell in header[:i]]
            if twice or not cells:
                found = f"two columns are called {twice[0]!r}" if twice else "blank"
                yield start, Ending(where, found, "a name for each column")
                return
        elif not cells:
            yield start, None
        elif len(cells) != len(header):
            expected = f"{len(header)}, as in the header; a cell that holds {delimiter!r} needs double quotes around it"
            yield start, Problem(where, f"{len(cells)} cells", expected)
        else:
            yield start, dict(zip(header, cells, strict=True))


def _lines(file: BinaryIO) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=1):
        if len(line) > MAX_LINE_BYTES:
            raise csv.Error(long_line("").found)
        yield decoded(line, number)
