"""Lines and JSON arrays: what cannot be used is reported with its line, and reading goes on."""

import json
from pathlib import Path

from data_helpers import contents, problems, refused, rows_of, source_of

from kit.data.read import text


def test_a_bad_line_is_named_and_reading_goes_on_after_it(folder):
    for line, message in (
        (b'{"text": }', "not JSON at column 10 (Expecting value); expected one JSON object a line"),
        (b"[1, 2]", "a list; expected one JSON object a line"),
        (b"null", "null"),
        (b'{"n": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
        (b'{"n": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 11 of the line; expected UTF-8 text"),
        (b'{"text": 1, "text": true}', "an object has the key 'text' twice, with different values"),
        (b'{"m": [{"role": "user", "te\\u0078t": 1, "text": 2}]}', "an object has the key 'text' twice"),
    ):
        # Equal values are no problem.
        (folder / "train.jsonl").write_bytes(b'{"text": ["a"], "text": ["a"]}\n' + line + b'\n{"text": "b"}\n')
        rows = rows_of(source_of("train.jsonl"))
        assert [number for number, row in rows if isinstance(row, dict)] == [1, 3]
        assert problems(source_of("train.jsonl"))[0].startswith(f"train.jsonl:2: {message}")


def test_blank_lines_count_as_lines(folder):
    (folder / "train.jsonl").write_bytes(b'\n{"n": 1}\n  \n\r\n{"n": 2}')
    assert rows_of(source_of("train.jsonl")) == [(1, None), (2, {"n": 1}), (3, None), (4, None), (5, {"n": 2})]


def test_a_byte_order_mark_and_windows_line_ends_are_read(folder):
    (folder / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"n": "a"}\r\n{"n": "b"}\r\n')
    (folder / "a.json").write_bytes(b'\xef\xbb\xbf\r\n[{"n": "a"},\r\n{"n": "b"}]\r\n')
    (folder / "a.csv").write_bytes(b"\xef\xbb\xbfn\r\na\r\nb\r\n")
    for name in ("a.jsonl", "a.json", "a.csv"):
        assert contents(source_of(name)) == [{"n": "a"}, {"n": "b"}]


def array(content):
    Path("a.json").write_bytes(content)
    return rows_of(source_of("a.json"))


def test_a_broken_array_is_reported_with_its_line(folder):
    for end, line, message in (
        (b'\n{"n": 2}]', 2, "not JSON at column 1 (Expecting ',' or ']'); expected one JSON object a line, or all in"),
        (b',\n{"n": 2}\n', 3, "not JSON at column 1 (Expecting ',' or ']')"),
        (b",\n  ]", 2, "not JSON at column 3 (Expecting value)"),
        (b'] {"n": 2}', 1, "not JSON at column 14 (Extra data)"),
        (b',\n {"n": 2 3}]', 2, "not JSON at column 10 (Expecting ',' delimiter)"),
        (b",\n" + b"1" * 5000 + b"]", 2, "not JSON at column 1 (Exceeds the limit"),
        (b",\n" + b"[" * 200_000, 2, "not JSON at column 1 (nested too deeply)"),
    ):
        first, *_, last = array(b'[{"n": "1"}' + end)
        assert str(last[1]).startswith(f"a.json:{line}: {message}") and isinstance(last[1], text.Ending)
        assert first == (1, {"n": "1"})


def test_an_array_with_bytes_that_are_no_text_is_reported_with_their_line(folder):
    (folder / "a.json").write_bytes(b'[{"n": "1"},\n{"n": "\xff"}]')
    assert "a.json:2: not UTF-8; expected UTF-8 text" in refused("a.json")


def test_the_elements_of_an_array_are_the_rows(folder, monkeypatch):
    rows = [{"text": 'é\u4f60\\"'}, {}, {"x": [{"y": -1e9}, None]}]
    for indent in (None, 1):
        assert [row for _, row in array(json.dumps(rows, indent=indent, ensure_ascii=False).encode())] == rows
    (folder / "a.json").write_bytes(b'{"n": 1}\n[1]\n')  # lines of arrays are no array
    assert problems(source_of("a.json"))[0].startswith("a.json:2: a list")
    twice = array(b'[{"n": 1}, {"n": 1, "n": 2}, {"n": 3}]')
    assert str(twice[1][1]).startswith("a.json row 2: an object has the key 'n' twice") and twice[2] == (3, {"n": 3})
    (folder / "a.json").write_text(" [ ]\n")
    assert refused("a.json") == "error: a.json: no rows; expected at least one"
    monkeypatch.setattr(text, "MAX_ARRAY_BYTES", 20)
    (folder / "a.json").write_text(json.dumps(rows))
    assert "a JSON array of more than" in refused("a.json")
