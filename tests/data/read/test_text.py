"""Lines, JSON arrays and tables of cells: what cannot be used is reported with its line, and reading goes on."""

import json
import tracemalloc
from pathlib import Path

import pytest
from data_helpers import contents, problems, refused, rows_of, source_of

# Lines


def bad_lines(line, after=b'{"text": "b"}\n', name="train.jsonl"):
    """What is reported of ``line``, the second of three of which the others are good."""
    Path(name).write_bytes(b'{"text": "a"}\n' + line + b"\n" + after)
    source = source_of(name)
    good = [number for number, row in rows_of(source) if isinstance(row, dict)]
    assert good == [1, 3]
    (reported,) = problems(source)
    return reported


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": }', "train.jsonl:2: not JSON at column 10 (Expecting value); expected one JSON object a line"),
        (b'{"text": "a"} {}', "train.jsonl:2: not JSON at column 14 (Extra data)"),
        (b'{"text": "a', "train.jsonl:2: not JSON at column 10 (Unterminated string starting at)"),
        (b"[1, 2]", "train.jsonl:2: a list; expected an object in braces"),
        (b"null", "train.jsonl:2: null; expected an object in braces"),
        (b'{"n": ' + b"1" * 5000 + b"}", "train.jsonl:2: Exceeds the limit"),
        (b'{"n": ' + b"[" * 200_000, "train.jsonl:2: nested too deeply"),
        (b'{"text": "\xff"}', "train.jsonl:2: not UTF-8 at byte 11 of the line; expected UTF-8 text"),
        (b'{"te\xef\xbb\xbfxt": "\xc3"}', "train.jsonl:2: not UTF-8"),
        (
            b'{"text": "a", "text": "b"}',
            "train.jsonl:2: an object has the key 'text' twice, with different values",
        ),
        (b'{"m": [{"role": "user", "te\\u0078t": 1, "text": 2}]}', "train.jsonl:2: an object has the key 'text' twice"),
    ],
)
def test_a_bad_line_is_named_and_reading_goes_on_behind_it(line, message):
    assert bad_lines(line).startswith(message)


def test_blank_lines_count_as_lines(folder):
    (folder / "train.jsonl").write_bytes(b'\n{"n": 1}\n  \n\r\n{"n": 2}')
    assert rows_of(source_of("train.jsonl")) == [(1, None), (2, {"n": 1}), (3, None), (4, None), (5, {"n": 2})]


def test_a_byte_order_mark_and_windows_line_ends_are_read(folder):
    (folder / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"n": "a"}\r\n{"n": "b"}\r\n')
    (folder / "a.json").write_bytes(b'\xef\xbb\xbf\r\n[{"n": "a"},\r\n{"n": "b"}]\r\n')
    (folder / "a.csv").write_bytes(b"\xef\xbb\xbfn\r\na\r\nb\r\n")
    for name in ("a.jsonl", "a.json", "a.csv"):
        assert contents(source_of(name)) == [{"n": "a"}, {"n": "b"}]


def test_a_byte_order_mark_before_bad_bytes_is_no_part_of_the_first_line(folder):
    (folder / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"n": 1}\n\xff\n')
    first, second = contents(source_of("a.jsonl"))
    assert first == {"n": 1} and "a.jsonl:2: not UTF-8 at byte 1" in str(second)


# JSON arrays


def test_an_element_with_a_key_twice_is_named_and_reading_goes_on_behind_it(folder):
    long = "a" * (1 << 19)  # so that the element with it does not fit in the first window
    rows = [{"text": "a"}, {"text": long}, {"text": "c"}]
    text = json.dumps(rows).replace('{"text": "aa', '{"text": 1, "text": "aa')
    (folder / "a.json").write_text(text)
    first, second, third = rows_of(source_of("a.json"))
    assert (first, third) == ((1, rows[0]), (3, rows[2]))
    assert str(second[1]).startswith("a.json row 2: an object has the key 'text' twice")


def array(content, name="a.json"):
    Path(name).write_bytes(content)
    return rows_of(source_of(name))


@pytest.mark.parametrize(
    ("end", "line", "message"),
    [
        (b'\n{"n": 2}]', 2, "not a JSON array at column 1 ('{'); expected ',' or ']'"),
        (b',\n{"n": 2}\n', 3, "the file ends inside a JSON array; expected a closing bracket"),
        (b",\n", 2, "not JSON at column 1 (Expecting value)"),
        (b",\n  ]", 2, "not JSON at column 3 (Expecting value)"),
        (b',\n{"n": 2', 2, "not JSON at column 8 (Expecting ',' delimiter)"),
        (b',\n{"n": "2\n', 2, "not JSON at column"),
        (b'] {"n": 2}', 1, "not a JSON array at column 14 ('{'); expected nothing after the array"),
        (b',\n {"n": 2 3}]', 2, "not JSON at column 10 (Expecting ',' delimiter); expected a JSON array of objects"),
        (b',\n{"n": "\xff"}]', 2, "not UTF-8; expected UTF-8 text"),
        (b",\n" + b"1" * 5000 + b"]", 2, "Exceeds the limit"),
        (b",\n" + b"[" * 200_000, 2, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("window", [4, 1 << 18])
def test_a_broken_array_is_reported_with_its_line(end, line, message, window, monkeypatch):
    monkeypatch.setattr("kit.data.read.text.READ_BYTES", window)
    rows = array(b'[{"n": "1"}' + end)
    assert str(rows[-1][1]).startswith(f"a.json:{line}: {message}")
    assert rows[0] == (1, {"n": "1"})


@pytest.mark.parametrize("window", range(1, 12))
def test_where_the_file_is_cut_into_windows_does_not_matter(window, monkeypatch):
    monkeypatch.setattr("kit.data.read.text.READ_BYTES", window)
    rows = [{"text": 'é\u4f60\\"', "n": [1, 2.5, None, True]}, {}, {"x": {"y": -1e9}}] * 3
    assert [row for _, row in array(json.dumps(rows, indent=1, ensure_ascii=False).encode())] == rows


def test_an_array_of_nothing_has_no_rows(folder):
    (folder / "a.json").write_text(" [ ]\n")
    assert refused("a.json") == "error: a.json: no rows; expected at least one"


@pytest.mark.slow
def test_an_array_is_read_piece_by_piece(folder):
    with open("a.json", "w") as file:
        file.write("[" + ",\n".join(json.dumps({"text": "a" * 1000}) for _ in range(20_000)) + "]")
    source = source_of("a.json")
    tracemalloc.start()
    try:
        assert sum(block.num_rows for block in source.parts[0].blocks()) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()
