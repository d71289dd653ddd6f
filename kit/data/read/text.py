"""Text to rows: lines of JSON, a JSON array, and tables of cells.

Promises: what cannot be used is a ``Problem`` at its line or row; reading goes on behind it, but not behind what is no
JSON inside a JSON array, where nothing shows what belongs to what; memory stays flat, also before a line without end.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

from kit.errors import Problem, kind

Row = tuple[int, Any]  # 1-based number of the line or row, and a dict, a Problem, or None for a blank line

MAX_LINE_BYTES = 1 << 24
READ_BYTES = 1 << 18
SPACE = re.compile(r"[ \t\r\n]*")
ONE_A_LINE = "one JSON object a line"
SPREAD = "is it one object over several lines? write each sample on one line, or all as a JSON array"
SEMICOLONS = "is it separated by ';'? only commas (.csv) and tabs (.tsv) are read"

_decoder = json.JSONDecoder()


class Bytes(Protocol):
    """What is read from: an open binary file. ``damage`` tells why its end is not the true one."""

    @property
    def damage(self) -> str: ...
    def read(self, size: int, /) -> bytes: ...
    def readline(self, size: int, /) -> bytes: ...


def json_rows(lines: bytes, first: int, name: str) -> Iterator[Row]:
    """Rows of whole lines, the first of which is number ``first`` of the file."""
    lines = lines.removesuffix(b"\n")
    try:
        texts: list[Any] = lines.decode("utf-8-sig" if first == 1 else "utf-8").split("\n")
    except UnicodeDecodeError:
        texts = lines.split(b"\n")
    for number, text in enumerate(texts, first):
        try:
            if isinstance(text, bytes):
                text = text.decode("utf-8-sig" if number == 1 else "utf-8")
            text = text.strip()
            row, end = _decoder.raw_decode(text) if text else (None, 0)
            if end < len(text):
                raise json.JSONDecodeError("Extra data", text, end)
        except UnicodeDecodeError as error:
            found = f"not UTF-8 at byte {error.start + 1} of the line"
            yield number, Problem(f"{name}:{number}", found, "UTF-8 text")
        except json.JSONDecodeError as error:
            found = f"not JSON at column {error.colno} ({error.msg})"
            yield number, Problem(f"{name}:{number}", found, ONE_A_LINE, SPREAD if text == "{" else "")
        except ValueError as error:  # an integer of more digits than Python converts
            yield number, Problem(f"{name}:{number}", str(error).split(";")[0], ONE_A_LINE)
        except RecursionError:
            yield number, Problem(f"{name}:{number}", "nested too deeply", ONE_A_LINE)
        else:
            yield number, _object(row, f"{name}:{number}") if text else None


def _object(value: Any, where: str) -> Any:
    return value if isinstance(value, dict) else Problem(where, kind(value), "an object in braces")


def long_line(where: str) -> Problem:
    found = f"a line of more than {MAX_LINE_BYTES >> 20} MiB"
    return Problem(where, found, "one sample a line", "split it into several samples")


def skip_line(reader: Bytes) -> None:
    """Go to the end of a line without holding it."""
    while (part := reader.readline(READ_BYTES)) and not part.endswith(b"\n"):
        pass


def csv_rows(reader: Bytes, name: str, delimiter: str) -> Iterator[Row]:
    """Rows of a table of cells, quoted as in RFC 4180. The first row names the columns. Numbers are of lines."""
    number, text = 0, ""

    def next_line() -> str:
        nonlocal number, text
        line = reader.readline(MAX_LINE_BYTES + 1)
        if not line or (reader.damage and not line.endswith(b"\n")):
            return ""
        number += 1
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            skip_line(reader)
            raise _BadLine(long_line(f"{name}:{number}"))
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            return text
        except UnicodeDecodeError as error:
            found = f"not UTF-8 at byte {error.start + 1} of the line"
            raise _BadLine(Problem(f"{name}:{number}", found, "UTF-8 text")) from None

    csv.field_size_limit(MAX_LINE_BYTES)
    # An iterator of this kind goes on after an exception. Without strict, a quote left open would swallow the rest.
    records = csv.reader(iter(next_line, ""), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        start = number + 1
        where = f"{name}:{start}"
        try:
            cells = next(records)
        except StopIteration:
            return
        except _BadLine as bad:
            yield number, bad.problem
            if not header:
                return
            continue
        except csv.Error as error:
            if not reader.damage:
                fix = SEMICOLONS if not header and ";" in text else ""
                expected = "quotes in pairs, inner ones doubled"
                yield start, Problem(where, f"not a row of cells ({error})", expected, fix)
            if not header:
                return
            continue
        if not header:
            if problem := _check_header(cells, where):
                yield start, problem
                return
            header = cells
        elif not cells:
            yield start, None
        elif len(cells) != len(header):
            yield start, Problem(where, f"{len(cells)} cells", f"{len(header)}, as in the header")
        else:
            yield start, dict(zip(header, cells, strict=True))


class _BadLine(Exception):
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def _check_header(cells: list[str], where: str) -> Problem | None:
    expected = "a first row with the names of the columns"
    if len(cells) == 1 and ";" in cells[0]:
        return Problem(where, f"a single column {cells[0]!r}", expected, SEMICOLONS)
    if not all(cell.strip() for cell in cells):
        return Problem(where, "a column without a name", expected)
    twice = [cell for i, cell in enumerate(cells) if cell in cells[:i]]
    return Problem(where, f"two columns are called {twice[0]!r}", expected) if twice else None


def array_rows(reader: Bytes, name: str) -> Iterator[Row]:
    """Elements of a JSON array, numbered from 1; ends behind the first thing that is not JSON, told with its line."""
    array, number = _Array(reader, name), 1
    try:
        array.take("[")
        if array.peek() == "]":
            array.take("]")
        else:
            while True:
                yield number, _object(array.element(), f"{name} row {number}")
                number += 1
                if array.take(",]") == "]":
                    break
        array.take("")
    except _BadLine as bad:
        if not reader.damage:
            yield number, bad.problem


class _Array:
    """A window on the text of an array. ``line`` is that of its first character not yet taken."""

    def __init__(self, reader: Bytes, name: str) -> None:
        self.reader, self.name, self.line = reader, name, 1
        self.text, self.at, self.column = "", 0, 0  # column: characters of this line before the window
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.has_ended = self.is_no_text = False  # or ended where it is no text any more

    def read_more(self) -> None:
        """At least as much again, so that a long element is not parsed too often."""
        kept = len(self.text) - self.at
        last_newline = self.text.rfind("\n", 0, self.at)
        self.column = self.at - last_newline - 1 if last_newline >= 0 else self.column + self.at
        chunk = self.reader.read(max(READ_BYTES, kept))
        self.has_ended = not chunk
        try:
            text = self.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            text = error.object[: error.start].decode()
            self.has_ended = self.is_no_text = True
        self.text, self.at = self.text[self.at :] + text, 0

    def move(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def peek(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            self.move(SPACE.match(self.text, self.at).end())  # type: ignore[union-attr]  # it matches nothing too
            if self.at < len(self.text) or self.has_ended:
                return self.text[self.at : self.at + 1]
            self.read_more()

    def take(self, allowed: str) -> str:
        """The next character, one of ``allowed``; none allowed: the end of the file."""
        found = self.peek()
        if found not in allowed or bool(found) != bool(allowed):
            if not found:
                raise self.bad("the file ends inside a JSON array", "a closing bracket")
            expected = " or ".join(map(repr, allowed)) or "nothing after the array"
            raise self.bad(f"not a JSON array at column {self.column_at(self.at)} ({found!r})", expected)
        self.move(self.at + len(found))
        return found

    def element(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = _decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - 16
                if is_cut and not self.has_ended and len(self.text) - self.at <= MAX_LINE_BYTES:
                    self.read_more()
                    continue
                if is_cut and not self.has_ended:
                    raise self.bad(f"an element of more than {MAX_LINE_BYTES >> 20} MiB", "smaller samples") from None
                column = self.column_at(error.pos)
                self.move(error.pos)
                raise self.bad(f"not JSON at column {column} ({error.msg})", "a JSON array of objects") from None
            except ValueError as error:  # an integer of more digits than Python converts
                raise self.bad(str(error).split(";")[0], "a JSON array of objects") from None
            except RecursionError:
                raise self.bad("nested too deeply", "a JSON array of objects") from None
            if end == len(self.text) and not self.has_ended:  # a number may go on
                self.read_more()
                continue
            self.move(end)
            return value

    def column_at(self, position: int) -> int:
        """1-based."""
        last_newline = self.text.rfind("\n", 0, position)
        return position - last_newline if last_newline >= 0 else self.column + position + 1

    def bad(self, found: str, expected: str) -> _BadLine:
        if self.is_no_text:
            self.line += self.text.count("\n", self.at)
            found, expected = "not UTF-8", "UTF-8 text"
        return _BadLine(Problem(f"{self.name}:{self.line}", found, expected))
