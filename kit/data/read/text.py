"""Text as rows: lines of JSON or of plain text, and JSON arrays. Tables of cells are read in ``cells``.

Promises:

- What cannot be used becomes a ``Problem`` with its line or row, and reading continues after it. The exception is a
  syntax error in a JSON array: after it nothing shows where the next element begins, so the rows end there.
- Memory use does not grow with the size of the file, nor with the length of a line. A JSON array is in memory as a
  whole, and limited.
- A JSON object that has a key twice becomes a ``Problem`` too.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from kit.data.strict_json import RepeatedKey, decode
from kit.errors import Problem, kind

Row = tuple[int, Any]  # the number of the line or row, from 1; its content: a dict, a Problem, or None if it is blank

NOT_UTF8 = "not UTF-8"  # so begins the problem of a line whose bytes cannot be decoded
NOT_JSON = "not JSON"  # so begins the problem of a line that is no JSON value
MAX_LINE_BYTES = 1 << 24
MAX_ARRAY_BYTES = 1 << 30
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
    for number, line in enumerate(lines.removesuffix(b"\n").split(b"\n"), first):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
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


class _Broken(Exception):
    """What is wrong with a JSON array at a position of its text."""

    def __init__(self, found: str, expected: str, at: int) -> None:
        self.found, self.expected, self.at = found, expected, at


def array_rows(reader: Bytes, name: str) -> Iterator[Row]:
    """Parse the elements of a JSON array, numbered from 1. A syntax error is the last row, with its line.

    The text is in memory as a whole: an array of more than ``MAX_ARRAY_BYTES`` is refused.
    """
    # In pieces, because a decompressor that meets damage in a piece returns nothing of it.
    pieces = iter(lambda: reader.read(READ_BYTES), b"")
    data = b"".join(islice(pieces, MAX_ARRAY_BYTES // READ_BYTES + 1))
    if len(data) > MAX_ARRAY_BYTES:
        found = f"a JSON array of more than {MAX_ARRAY_BYTES >> 30} GiB"
        yield 1, Ending(name, found, "one JSON object a line", "write it so, as .jsonl")
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not reader.damage:
            line = data.count(b"\n", 0, error.start) + 1
            yield 1, Ending(f"{name}:{line}", NOT_UTF8, "UTF-8 text")
            return
        text = data[: error.start].decode("utf-8-sig")  # cut within a character
    number = 1
    try:
        for value in _elements(text):
            yield number, _object(value, f"{name} row {number}")
            number += 1
    except _Broken as broken:
        if not reader.damage:
            line = text.count("\n", 0, broken.at) + 1
            yield number, Ending(f"{name}:{line}", broken.found, broken.expected)


def _elements(text: str) -> Iterator[Any]:
    """Yield the elements of a JSON array, which is all of ``text``. Raises ``_Broken``."""
    end, at = _take(text, 0, "[")
    if text[at : at + 1] == "]":
        end, at = _take(text, at, "]")
    while end != "]":
        try:
            value, behind = decode(text, at)
        except json.JSONDecodeError as error:
            raise _Broken(f"{NOT_JSON} ({error.msg})", "a JSON array of objects", error.pos) from None
        except (ValueError, RecursionError) as error:  # an integer with more digits than Python's limit
            found = str(error).split(";")[0] if isinstance(error, ValueError) else "nested too deeply"
            raise _Broken(found, "a JSON array of objects", at) from None
        yield value
        end, at = _take(text, behind, ",]")
    _take(text, at, "")


def _take(text: str, at: int, allowed: str) -> tuple[str, int]:
    """Parse a character, one of ``allowed`` (none: the end of the text). Returns it, and where what follows begins."""
    at = _behind_spaces(text, at)
    found = text[at : at + 1]
    if found not in allowed or bool(found) != bool(allowed):
        expected = " or ".join(map(repr, allowed)) or "nothing after the array"
        raise _Broken(f"not a JSON array ({found!r})" if found else "the file ends inside a JSON array", expected, at)
    return found, _behind_spaces(text, at + len(found))


def _behind_spaces(text: str, at: int) -> int:
    return SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too
