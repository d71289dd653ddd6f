"""Commands that turn a file which the kit does not read into one that it does.

Promises: a command was tried on the file itself before it is named, and the file stays beside what is made of it. Where
none is known, the text says what the file needs.
"""

import ast
import codecs
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from kit.data.read.archives import Location, open_location, split_name
from kit.data.strict_json import parse

MAX_TRIED_BYTES = 1 << 28  # a longer file is not tried, and no command is named for it
READ_BYTES = 1 << 20
PROGRAMS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}  # what unpacks with -dc, and packs
ENCODING = "write it in UTF-8: mv FILE FILE.old && iconv -f ENCODING -t UTF-8 < FILE.old > FILE"
AGAIN = ", and start again"

# What to do about files that hold text or tables in another form, by their suffix.
OTHER_FORMS = {
    **dict.fromkeys(
        (".xlsx", ".xls", ".xlsm", ".ods", ".numbers"),
        "save the sheet as 'CSV UTF-8' in the program that made it, with the names of the columns in its first row",
    ),
    **dict.fromkeys(
        (".docx", ".doc", ".odt", ".rtf", ".pdf", ".pptx", ".epub", ".html", ".htm"),
        "a document has no rows: write the questions and answers, or the texts, that the model shall learn into a "
        '.jsonl file, one a line: {"prompt": "...", "completion": "..."}, or {"text": "..."}',
    ),
    **dict.fromkeys(
        (".pkl", ".pickle", ".pt", ".pth", ".bin"),
        "such a file may run code when it is opened, so it never is: write its rows into a .jsonl file",
    ),
    **dict.fromkeys(
        (".db", ".sqlite", ".sqlite3"), "write the rows of a table into a .csv file: sqlite3 -csv -header FILE QUERY"
    ),
    **dict.fromkeys(
        (".md", ".markdown", ".rst", ".log", ".tex", ".py"),
        'write each text as one line of a .jsonl file: {"text": "..."}',
    ),
    **dict.fromkeys((".yaml", ".yml", ".xml", ".toml"), "write its rows into a .jsonl file, one JSON object a line"),
    **dict.fromkeys((".rar", ".7z"), "unpack it, and give the folder"),
}


def in_other_form(suffix: str) -> str:
    """What to do about a file with a suffix that is not read; empty if it is not known."""
    return OTHER_FORMS.get(suffix.lower(), "")


def in_utf8(name: str) -> str:
    """What to do about the file ``name``, which is not UTF-8; empty if only single lines of it are damaged."""
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        return ENCODING
    encoding = _encoding_of(Location(path, os.path.getsize(path)))
    if encoding is None:
        return ""
    if not encoding:
        return ENCODING
    command = _in_place(path, encoding.lower(), f"iconv -f {encoding} -t UTF-8")
    return f"`{command}`{AGAIN}"


def _encoding_of(location: Location) -> str | None:
    """The encoding of a file that is not UTF-8, as iconv calls it.

    Empty if it is not known; None if other lines of it are UTF-8 and no ASCII, so that it has no other encoding.
    """
    with open_location(location) as reader:
        first = reader.peek(4)[:4]
        if first.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
            return "UTF-32"
        if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "UTF-16"
        if b"\0" in first:
            return "UTF-16LE" if first[1:2] == b"\0" else "UTF-16BE"
        decoder = codecs.getincrementaldecoder("cp1252")()
        num_bytes = 0
        while lines := reader.read(READ_BYTES) + reader.readline(READ_BYTES):
            num_bytes += len(lines)
            if not lines.isascii() and any(_is_other_utf8(line) for line in lines.split(b"\n")):
                return None
            try:
                decoder.decode(lines)
            except UnicodeDecodeError:
                return ""
            if num_bytes > MAX_TRIED_BYTES:
                return ""
    return "CP1252"


def _is_other_utf8(line: bytes) -> bool:
    """Whether a line is UTF-8, and not ASCII."""
    try:
        return not line.isascii() and bool(line.decode())
    except UnicodeDecodeError:
        return False


def is_utf16(first: bytes) -> bool:
    """Whether a file that begins with these bytes says that it is UTF-16, or UTF-32."""
    return first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def with_line_breaks(name: str) -> str:
    """What to do about a file whose lines end in a carriage return alone, as on an old Mac."""
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        return ""
    command = _in_place(path, "cr", r"tr '\r' '\n'")
    return f"`{command}`{AGAIN}"


def with_header(name: str, header: list[str]) -> str:
    """What to do about a table whose first line is to be replaced by these names of columns; empty if it is no file."""
    path = os.path.expanduser(name)
    if not os.path.isfile(path) or any(re.search(r'[",;\t\\&/\n]', cell) for cell in header):
        return ""
    command = f"sed {shlex.quote('1s/.*/' + ','.join(header) + '/')}"
    return f"`{_in_place(path, 'old', command)}`{AGAIN}"


def _in_place(path: str, ending: str, command: str) -> str:
    """The command that renames a file, and writes what ``command`` makes of it under its name."""
    suffix = split_name(path)[1]
    old, new = shlex.quote(f"{path}.{ending}"), shlex.quote(path)
    if suffix:
        return f"mv {new} {old} && {PROGRAMS[suffix]} -dc < {old} | {command} | {PROGRAMS[suffix]} > {new}"
    return f"mv {new} {old} && {command} < {old} > {new}"


def as_lines(location: Location, flag: str) -> str:
    """What to do about a JSON file whose rows are inside a larger value, or not one a line; empty if it is not known.

    ``flag`` is the recipe's key for the data set.
    """
    if location.member or split_name(location.path)[1] or location.num_bytes > MAX_TRIED_BYTES:
        return ""
    try:
        with open(location.path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return ""
    program = next((program for rows, program in _readings(text) if _tried(rows)), "")
    if not program:
        return ""
    imports = ", ".join(name for name in ("ast", "json", "re") if name == "json" or f"{name}." in program)
    made = _free_name(os.path.splitext(os.path.basename(location.path))[0])
    rows = program.replace("FILE", f"open({location.path!r}, encoding='utf-8-sig')")
    written = f"open({made!r}, 'w').writelines(json.dumps(row) + '\\n' for row in rows)"
    program = f"import {imports}; rows = {rows}; {written}"
    quoted = shlex.quote(program) if re.search(r'["$`!]', program) else f'"{program}"'
    return f"`python -c {quoted}`, then --{flag} {shlex.quote(made)}"


def _free_name(stem: str) -> str:
    """The name of a file that is not there yet."""
    names = (f"{stem}.rows{number}.jsonl" for number in ("", *range(2, 1000)))
    return next(name for name in names if not os.path.exists(name))


def _readings(text: str) -> Iterator[tuple[Callable[[], Any], str]]:
    """Yield ways to find rows in a text: a function that does so, and the same as a program for the file FILE."""
    value = _tried(lambda: parse(text))
    if isinstance(value, dict):
        # A conversation is a list of objects too, but one row.
        lists = {key: rows for key, rows in value.items() if isinstance(rows, list | dict)}
        if all(_are_rows(rows) and not {"role", "from"} & rows[0].keys() for rows in lists.values()):
            for key in sorted(lists, key=lambda key: (key != "train", -len(lists[key]))):
                yield lambda: True, f"json.load(FILE)[{key!r}]"
        if _are_rows(list(value.values())):
            yield lambda: True, "json.load(FILE).values()"
        lengths = {len(each) if isinstance(each, list) and not _are_rows(each) else None for each in value.values()}
        if len(lengths) == 1 and None not in lengths:
            yield lambda: True, "[dict(zip(d, row)) for d in [json.load(FILE)] for row in zip(*d.values())]"
        if "\n" in text.strip():
            yield lambda: bool(value), "[json.load(FILE)]"
    elif value is None:
        joined = re.sub(r"\}\s*\{", "}, {", text)
        program = r"json.loads('[' + re.sub(r'\}\s*\{', '}, {', FILE.read()) + ']')"
        yield lambda: _follow(parse(f"[{joined}]"), text), program
        program = "json.loads('[' + FILE.read().strip().rstrip(',') + ']')"
        yield lambda: _are_rows(parse(f"[{text.strip().rstrip(',')}]")), program
        lines = [line for line in text.splitlines() if line.strip()]
        program = "[ast.literal_eval(line) for line in FILE if line.strip()]"
        yield lambda: _are_rows([ast.literal_eval(line) for line in lines]), program


def _follow(rows: Any, text: str) -> bool:
    """Whether ``text`` is these objects, one after another."""
    at, end = 0, len(text.rstrip())
    for row in rows:
        start = len(text) - len(text[at:].lstrip())
        found, at = json.JSONDecoder().raw_decode(text, start)
        if found != row:
            return False
    return at == end and _are_rows(rows)


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
