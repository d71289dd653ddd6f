"""Text as rows: lines of JSON or of plain text, and JSON arrays. Tables of cells are read in ``cells``.

Promises:

- What cannot be used becomes a ``Problem`` with its line or row, and reading continues after it. The exception is a
  syntax error in a JSON array: after it nothing shows where the next element begins, so the rows end there.
- Memory use does not grow with the size of the file. A JSON array is in memory as a whole, and limited.
- A JSON object that has a key twice becomes a ``Problem`` too.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from kit.data.strict_json import RepeatedKey, decode, parse
from kit.system.errors import Problem, kind

Row = tuple[int, Any]  # the number of the line or row, from 1; its content: a dict, a Problem, or None if it is blank

MAX_LINE_BYTES = 1 << 24
MAX_ARRAY_BYTES = 1 << 30
MARK = re.compile(r"[ \t\r\n]*(.?)[ \t\r\n]*", re.DOTALL)  # between the elements of an array
OBJECTS = "one JSON object a line, or all in a JSON array"


@dataclass(frozen=True, slots=True)
class Ending(Problem):
    """A problem after which the rest of a part cannot be read: it is not that of one row, which could be skipped."""

    fix: str = "correct the file there, or copy it again: what follows cannot be read"


def rows_of_lines(lines: bytes, first: int, name: str, parse_line: Callable[[str, str], Any]) -> Iterator[Row]:
    """Parse whole lines, each to a row.

    Args:
        first: the number of the first line in its file.
        name: the file's.
        parse_line: returns the row for a line that is not blank, and for where it is; an exception becomes a
            ``Problem``.
    """
    for number, line in enumerate(lines.removesuffix(b"\n").split(b"\n"), first):
        where = f"{name}:{number}"
        try:
            text = decoded(line, number).removesuffix("\r")
            row = parse_line(text, where) if text.strip() else None
        except (ValueError, RecursionError) as error:
            row = Problem(where, *reason(error))
        yield number, row


def decoded(line: bytes, number: int) -> str:
    """Return the text of line ``number`` of a file. Raises ``UnicodeDecodeError``."""
    return line.decode("utf-8-sig" if number == 1 else "utf-8")


def json_row(line: str, where: str) -> Any:
    """Parse a line of JSON. Raises ``ValueError`` or ``RecursionError``."""
    return _object(parse(line.strip()), where)


def reason(error: Exception) -> tuple[str, str]:
    """Return what was found and what is expected, for an error in a line."""
    match error:
        case RepeatedKey():
            return error.found, error.expected
        case UnicodeDecodeError():
            return f"not UTF-8 at byte {error.start + 1} of the line", "UTF-8 text"
        case json.JSONDecodeError():
            return f"not JSON at column {error.colno} ({error.msg})", OBJECTS
        case RecursionError():
            return "nested too deeply", OBJECTS
    return str(error).split(";")[0], OBJECTS  # an integer with more digits than Python's limit


def _object(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return value
    return Problem(where, *(reason(value) if isinstance(value, RepeatedKey) else (kind(value), OBJECTS)))


def long_line(where: str) -> Ending:
    """The problem of a line with more than ``MAX_LINE_BYTES``."""
    found = f"a line of more than {MAX_LINE_BYTES >> 20} MiB"
    return Ending(where, found, "one sample a line", "split it into several samples")


def array_rows(file: BinaryIO, name: str) -> Iterator[Row]:
    """Parse the elements of a JSON array, numbered from 1. A syntax error is the last row, with its line.

    The text is in memory as a whole: an array of more than ``MAX_ARRAY_BYTES`` is refused.
    """
    data = file.read(MAX_ARRAY_BYTES + 1)
    number = 1
    if len(data) > MAX_ARRAY_BYTES:
        found = f"a JSON array of more than {MAX_ARRAY_BYTES >> 30} GiB"
        yield number, Ending(name, found, "one JSON object a line", "write it so, as .jsonl")
        return
    try:
        for value in _elements(data.decode("utf-8-sig")):
            yield number, _object(value, f"{name} row {number}")
            number += 1
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield number, Ending(f"{name}:{line}", "not UTF-8", "UTF-8 text")
    except json.JSONDecodeError as error:
        yield number, Ending(f"{name}:{error.lineno}", *reason(error))


def _elements(text: str) -> Iterator[Any]:
    """Yield the elements of a JSON array, which is all of ``text``. Raises ``json.JSONDecodeError``."""
    mark, at = _mark(text, 0, "[")
    if text[at : at + 1] == "]":
        mark, at = _mark(text, at, "]")
    while mark != "]":
        try:
            value, at = decode(text, at)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise json.JSONDecodeError(reason(error)[0], text, at) from None
        yield value
        mark, at = _mark(text, at, ",]")
    if at < len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _mark(text: str, at: int, allowed: str) -> tuple[str, int]:
    """Parse a character, one of ``allowed``. Returns it, and where what follows begins."""
    found = MARK.match(text, at)
    assert found is not None  # it matches nothing too
    if not found[1] or found[1] not in allowed:
        raise json.JSONDecodeError(f"Expecting {' or '.join(map(repr, allowed))}", text, found.start(1))
    return found[1], found.end()
