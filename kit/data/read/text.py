"""Text as rows: lines of JSON or of plain text, and JSON arrays. Tables of cells are read in ``cells``.

Promises:

- What cannot be used becomes a ``Problem`` with its line or row, and reading continues after it. The exception is a
  syntax error in a JSON array: after it nothing shows where the next element begins, so the rows end there.
- Memory use does not grow with the size of the file, nor with the length of a line.
- A JSON object that has a key twice becomes a ``Problem`` too.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from kit.data.strict_json import RepeatedKey, decode
from kit.errors import Problem, kind

Row = tuple[int, Any]  # the number of the line or row, from 1; its content: a dict, a Problem, or None if it is blank

NOT_UTF8 = "not UTF-8"  # so begins the problem of a line whose bytes cannot be decoded
NOT_JSON = "not JSON"  # so begins the problem of a line that is no JSON value
MAX_LINE_BYTES = 1 << 24
MAX_SKIPPED_BYTES = 1 << 30
READ_BYTES = 1 << 18
SPACE = re.compile(r"[ \t\r\n]*")
ONE_A_LINE = "one JSON object a line, or all in a JSON array"


@dataclass(frozen=True, slots=True)
class Ending(Problem):
    """A problem after which the rest of a part cannot be read: it is not that of one row, which could be skipped."""


class Bytes(Protocol):
    """What the functions here read from: an open binary file."""

    @property
    def damage(self) -> str:
        """Why the bytes ended before the true end of the file; empty if they did not."""

    def read(self, size: int, /) -> bytes:
        """Read up to ``size`` bytes; empty at the end of the file."""

    def readline(self, size: int, /) -> bytes:
        """Read up to the next line break, but at most ``size`` bytes."""


def json_rows(lines: bytes, first: int, name: str) -> Iterator[Row]:
    """Parse whole lines of JSON objects. ``first`` is the number of the first line in its file, ``name`` the file's."""
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
            row = _decode_line(text) if text else None
        except UnicodeDecodeError as error:
            found = f"{NOT_UTF8} at byte {error.start + 1} of the line"
            yield number, Problem(f"{name}:{number}", found, "UTF-8 text")
        except json.JSONDecodeError as error:
            found = f"{NOT_JSON} at column {error.colno} ({error.msg})"
            yield number, Problem(f"{name}:{number}", found, ONE_A_LINE)
        except ValueError as error:  # an integer with more digits than Python's limit
            yield number, Problem(f"{name}:{number}", str(error).split(";")[0], ONE_A_LINE)
        except RecursionError:
            yield number, Problem(f"{name}:{number}", "nested too deeply", ONE_A_LINE)
        else:
            yield number, _object(row, f"{name}:{number}") if text else None


def _decode_line(text: str) -> Any:
    """Parse one JSON value, see ``strict_json.decode``. Raises ``json.JSONDecodeError`` too if anything follows it."""
    value, end = decode(text)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _object(value: Any, where: str) -> Any:
    if isinstance(value, RepeatedKey):
        return Problem(where, value.found, value.expected)
    return value if isinstance(value, dict) else Problem(where, kind(value), "an object in braces")


def long_line(where: str) -> Problem:
    """The problem of a line with more than ``MAX_LINE_BYTES``."""
    found = f"a line of more than {MAX_LINE_BYTES >> 20} MiB"
    return Problem(where, found, "one sample a line", "split it into several samples")


def skip_line(reader: Bytes) -> None:
    """Read to the end of the current line without keeping it in memory.

    Raises ``ValueError`` for a line without end: a few kilobytes can be unpacked to one of terabytes.
    """
    num_bytes = 0
    while part := reader.readline(READ_BYTES):
        num_bytes += len(part)
        if part.endswith(b"\n"):
            break
        if num_bytes > MAX_SKIPPED_BYTES:
            raise ValueError(f"a line of more than {MAX_SKIPPED_BYTES >> 30} GiB")


def text_rows(lines: bytes, first: int, name: str) -> Iterator[Row]:
    """Whole lines of plain text, each a row with the column ``text``. The arguments are those of ``json_rows``."""
    for number, line in enumerate(lines.removesuffix(b"\n").split(b"\n"), first):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            yield number, Problem(f"{name}:{number}", f"{NOT_UTF8} at byte {error.start + 1} of the line", "UTF-8 text")
        else:
            yield number, {"text": text} if text.strip() else None


class _BadLine(Exception):
    """Carries the ``Problem`` of a line out of a parser."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def array_rows(reader: Bytes, name: str) -> Iterator[Row]:
    """Parse the elements of a JSON array, numbered from 1. A syntax error is the last row, with its line."""
    array = _Array(reader, name)
    number = 1
    try:
        array.take("[")
        end = array.take("]") if array.next() == "]" else ""
        while end != "]":
            yield number, _object(array.element(), f"{name} row {number}")
            number += 1
            end = array.take(",]")
        array.take("")
    except _BadLine as bad:
        if not reader.damage:
            yield number, Ending(*astuple(bad.problem))


class _Array:
    """Parses a JSON array through a window on its text, so that the text never has to be in memory as a whole."""

    def __init__(self, reader: Bytes, name: str) -> None:
        self._reader = reader
        self._name = name
        self._text = ""  # the window
        self._at = 0  # the position in it up to which it is parsed
        self._line = 1  # line number at that position
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._has_ended = False  # the window reaches to the end of the file

    def _read_more(self) -> None:
        """Extend the window, at least to twice what is unparsed: then a long element is not parsed too often."""
        unparsed = self._text[self._at :]
        chunk = self._reader.read(max(READ_BYTES, len(unparsed)))
        self._has_ended = not chunk
        try:
            self._text, self._at = unparsed + self._decode(chunk, final=not chunk), 0
        except UnicodeDecodeError as error:
            self._text, self._at = unparsed + error.object[: error.start].decode(), 0
            raise self._bad(NOT_UTF8, "UTF-8 text", len(self._text)) from None

    def _move(self, end: int) -> None:
        """Mark the window as parsed up to ``end``."""
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def next(self) -> str:
        """Skip spaces, and return the next character without parsing it. Empty at the end of the file."""
        while True:
            self._move(SPACE.match(self._text, self._at).end())  # type: ignore[union-attr]  # it matches nothing too
            if self._at < len(self._text) or self._has_ended:
                return self._text[self._at : self._at + 1]
            self._read_more()

    def take(self, allowed: str) -> str:
        """Parse the next character, which must be one of ``allowed``; if that is empty, the file must end here.

        Raises ``_BadLine`` for anything else.
        """
        found = self.next()
        if found not in allowed or bool(found) != bool(allowed):
            expected = " or ".join(map(repr, allowed)) or "nothing after the array"
            raise self._bad(f"not a JSON array ({found!r})" if found else "the file ends inside a JSON array", expected)
        self._move(self._at + len(found))
        return found

    def element(self) -> Any:
        """Parse the next element. Raises ``_BadLine`` if it is not JSON or too long."""
        self.next()
        while True:
            size = len(self._text) - self._at
            try:
                value, end = decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - 16
                if not is_cut or self._has_ended:
                    raise self._bad(f"{NOT_JSON} ({error.msg})", "a JSON array of objects", error.pos) from None
                if size > MAX_LINE_BYTES:
                    found = f"an element of more than {MAX_LINE_BYTES >> 20} MiB"
                    raise self._bad(found, "smaller samples") from None
            except (ValueError, RecursionError) as error:  # an integer with more digits than Python's limit
                found = str(error).split(";")[0] if isinstance(error, ValueError) else "nested too deeply"
                raise self._bad(found, "a JSON array of objects") from None
            else:
                if end < len(self._text) or self._has_ended:  # else a number may go on
                    self._move(end)
                    return value
            self._read_more()

    def _bad(self, found: str, expected: str, at: int = 0) -> _BadLine:
        """The exception to raise for the line of position ``at``, or of the parsed position."""
        line = self._line + self._text.count("\n", self._at, max(at, self._at))
        return _BadLine(Problem(f"{self._name}:{line}", found, expected))
