"""What a name leads to, and how its rows are read: all of them, in order, or told which cannot be and why."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import re
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from kit.config.recipe import DATA_SUFFIXES, DatasetEntry
from kit.data.read import archives, tables
from kit.data.read import parts as files
from kit.data.read import text as records
from kit.data.read.sources import FIX, SUFFIXES, open_source, read_rows, shown
from kit.errors import Problem, UserError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path.parent / f"{tmp_path.name}-cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(name, split="train", **options):
    return open_source(str(name), split, "dataset", **options)


def rows_of(source, columns=None):
    """Numbers of lines or rows, and what is in them."""
    return [(number, row) for _, number, row in read_rows(source.parts, columns)]


def contents(source, columns=None):
    return [row for _, row in rows_of(source, columns)]


def problems(source):
    return [str(row) for row in contents(source) if isinstance(row, Problem)]


def refused(name, split="train", **options):
    with pytest.raises(UserError) as caught:
        opened(name, split, **options)
    return str(caught.value)


def texts(num, first=0):
    return [{"text": f"ü {i}", "n": i} for i in range(first, first + num)]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def cells(rows, delimiter=","):
    return "".join(f"{delimiter.join(map(str, row))}\n" for row in rows).encode()


def zst(content):
    import pyarrow

    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(content)
    return buffer.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


def pack_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def tar_bytes(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


# The same rows from every kind of file


def write_table(path, rows):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=700)
    else:
        make = pyarrow.ipc.new_file if "file" in path.stem else pyarrow.ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table)


def write_any(name, rows):
    path = Path(name)
    if path.suffix in (".parquet", ".arrow"):
        write_table(path, rows)
    elif path.suffix == ".zip":
        pack_zip(path, {"data/1.jsonl": lines(rows[900:]), "data/0.jsonl": lines(rows[:900]), "README.md": b"Rows"})
    elif ".tar" in name or path.suffix in archives.TAR_COMPRESSIONS:
        content = tar_bytes({"data/0.jsonl": lines(rows[:900]), "README": b"Rows", "data/1.jsonl": lines(rows[900:])})
        suffix = archives.TAR_COMPRESSIONS.get(path.suffix, path.suffix)
        path.write_bytes(COMPRESS.get(suffix, bytes)(content))
    else:
        kind = path.suffixes[0]
        if kind == ".json":
            content = json.dumps(rows, indent=2).encode()
        elif kind in (".csv", ".tsv"):
            delimiter = "," if kind == ".csv" else "\t"
            content = cells([("text", "n"), *((row["text"], row["n"]) for row in rows)], delimiter)
        else:
            content = lines(rows)
        path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))


NAMES = [
    *["a.jsonl", "a.ndjson", "a.json", "a.csv", "a.tsv", "a.parquet", "file.arrow", "stream.arrow", "A.JSONL"],
    *["a.jsonl.gz", "a.json.bz2", "a.csv.xz", "a.tsv.zst", "a.ndjson.zst"],
    *["a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.xz", "a.tar.bz2", "a.tar.zst", "a.tzst"],
]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_gives_all_rows_in_order(name, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 5000)
    rows = texts(2300)
    write_any(name, rows)
    source = opened(name)
    if ".csv" in name or ".tsv" in name:
        rows = [{"text": row["text"], "n": str(row["n"])} for row in rows]
    assert contents(source) == rows
    if len(source.parts) == 1:
        assert [number for number, _ in rows_of(source)] == [
            i + 1 + (".csv" in name or ".tsv" in name) for i in range(2300)
        ]
    assert source.columns == ["text", "n"]
    parts = pickle.loads(pickle.dumps(source.parts))
    assert [row for _, _, row in read_rows(parts)] == rows
    for part in source.parts:
        blocks = list(part.blocks(["text"]))
        assert [len(list(part.rows(block))) for block in blocks] == [block.num_rows for block in blocks]
        assert list(part.blocks(["text"])) == blocks
        assert list(part.rows(pickle.loads(pickle.dumps(blocks[-1])))) == list(part.rows(blocks[-1]))
        assert len(blocks) >= len(rows) // len(source.parts) // 1000 and max(b.num_rows for b in blocks) <= 1000
    if source.total is not None:
        assert sum(block.size for part in source.parts for block in part.blocks()) == source.total


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_of_tables_only_the_needed_columns_are_read(name):
    write_any(name, texts(3))
    assert contents(opened(name), ["text", "else"]) == [{"text": f"ü {i}"} for i in range(3)]
    assert contents(opened(name), []) == [{}] * 3


def test_places_are_lines_or_rows_of_a_part():
    write_any("a.zip", texts(1000))
    write_any("a.parquet", texts(3))
    assert opened("a.zip").origin(1, 17) == "a.zip!data/1.jsonl:17"
    assert opened("a.parquet").origin(0, 2) == "a.parquet row 2"


def test_sizes_are_told_where_they_add_up(folder):
    (folder / "mixed").mkdir()
    write_any("mixed/a.jsonl", texts(3))
    write_any("mixed/b.parquet", texts(3))
    write_any("stream.arrow", texts(3))
    assert (opened("mixed/*.jsonl").total, opened("mixed/*.jsonl").unit) == (len(lines(texts(3))), "B")
    assert (opened("mixed/*.parquet").total, opened("mixed/*.parquet").unit) == (3, " rows")
    assert (opened("stream.arrow").total, opened("stream.arrow").unit) == (None, " rows")
    assert (opened("mixed").total, opened("mixed").unit) == (None, "")
    assert contents(opened("mixed")) == texts(3) * 2


# Lines


def bad_lines(line, after=b'{"text": "b"}\n', name="train.jsonl"):
    """What is told of ``line``, the second of three of which the others are good."""
    Path(name).write_bytes(b'{"text": "a"}\n' + line + b"\n" + after)
    source = opened(name)
    good = [number for number, row in rows_of(source) if isinstance(row, dict)]
    assert good == [1, 3]
    (told,) = problems(source)
    return told


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
    ],
)
def test_a_bad_line_is_named_and_reading_goes_on_behind_it(line, message):
    assert bad_lines(line).startswith(message)


def test_blank_lines_count_as_lines(folder):
    (folder / "train.jsonl").write_bytes(b'\n{"n": 1}\n  \n\r\n{"n": 2}')
    assert rows_of(opened("train.jsonl")) == [(1, None), (2, {"n": 1}), (3, None), (4, None), (5, {"n": 2})]


def test_a_byte_order_mark_and_windows_line_ends_are_read(folder):
    (folder / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"n": "a"}\r\n{"n": "b"}\r\n')
    (folder / "a.json").write_bytes(b'\xef\xbb\xbf\r\n[{"n": "a"},\r\n{"n": "b"}]\r\n')
    (folder / "a.csv").write_bytes(b"\xef\xbb\xbfn\r\na\r\nb\r\n")
    for name in ("a.jsonl", "a.json", "a.csv"):
        assert contents(opened(name)) == [{"n": "a"}, {"n": "b"}]


def test_a_byte_order_mark_before_bad_bytes_is_no_part_of_the_first_line(folder):
    (folder / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"n": 1}\n\xff\n')
    first, second = contents(opened("a.jsonl"))
    assert first == {"n": 1} and "a.jsonl:2: not UTF-8 at byte 1" in str(second)


@pytest.mark.parametrize("extra", [0, 1])
def test_a_line_may_have_so_many_bytes_and_no_more(extra, folder, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1 << 20)
    row = {"text": "a" * ((1 << 20) - len('{"text": ""}') + extra)}
    (folder / "train.jsonl").write_bytes(lines([*texts(2), row, *texts(2)]))
    (folder / "last.jsonl").write_bytes(lines([*texts(2), row]).rstrip())
    (folder / "train.csv").write_bytes(b"text\na\n" + b"a" * ((1 << 20) + extra) + b"\nb\n")
    long = "train.jsonl:3: a line of more than 1 MiB; expected one sample a line"
    assert [text.splitlines()[0] for text in problems(opened("train.jsonl"))] == [long] * extra
    assert [row.get("n") for row in contents(opened("train.jsonl")) if isinstance(row, dict)][-2:] == [0, 1]
    assert len(problems(opened("last.jsonl"))) == len(problems(opened("train.csv"))) == extra
    assert contents(opened("train.csv"))[-1] == {"text": "b"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz", "a.zip", "a.json"])
def test_a_line_without_end_takes_no_memory(name, folder):
    long = b"a" * (50 << 20)
    if name == "a.json":
        content = b'[{"text": "' + long + b'"}]'
    else:
        content = (b"text\n" if name == "a.csv" else b"") + b'{"text": 1}\n' + long + b'\n{"text": 2}\n'
    if name == "a.zip":
        pack_zip(folder / name, {"a.jsonl": content})
    else:
        (folder / name).write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    del content, long
    tracemalloc.start()
    try:
        if name == "a.json":
            assert "a.json:1: an element of more than 16 MiB" in refused(name)
            limit = 90 << 20  # text in a window, its bytes, and what the parser takes
        else:
            source = opened(name)
            first, told, last = contents(source)
            assert "more than 16 MiB" in str(told) and isinstance(first, dict) and isinstance(last, dict)
            limit = 40 << 20
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


# JSON arrays


def array(content, name="a.json"):
    Path(name).write_bytes(content)
    return rows_of(opened(name))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.tgz"])
def test_elements_of_an_array_are_rows_as_they_may_share_a_line(name, folder):
    content = b'\n [ {"n": 1}, {"n":\n2},\n\n3\n,{"n": [1,\n2]}]\n\n'
    content = tar_bytes({"a.json": content}) if name == "a.tgz" else content
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    source = opened(name)
    rows = rows_of(pickle.loads(pickle.dumps(source)))
    shown_name = "a.tgz!a.json" if name == "a.tgz" else name
    assert [number for number, _ in rows] == [1, 2, 3, 4] and source.origin(0, 2) == f"{shown_name} row 2"
    assert str(rows[2][1]) == f"{shown_name} row 3: a number; expected an object in braces"
    assert [row for _, row in rows if isinstance(row, dict)] == [{"n": 1}, {"n": 2}, {"n": [1, 2]}]


def test_lines_of_arrays_are_no_array_and_keep_their_lines(folder):
    (folder / "a.json").write_bytes(b'{"n": 1}\n[1]\n')
    source = opened("a.json")
    assert source.origin(0, 1) == "a.json:1" and problems(source)[0].startswith("a.json:2: a list")


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
def test_what_is_no_array_is_told_by_line(end, line, message, window, monkeypatch):
    monkeypatch.setattr(records, "READ_BYTES", window)
    rows = array(b'[{"n": "1"}' + end)
    assert str(rows[-1][1]).startswith(f"a.json:{line}: {message}")
    assert rows[0] == (1, {"n": "1"})


@pytest.mark.parametrize("window", range(1, 12))
def test_where_the_file_is_cut_into_windows_does_not_matter(window, monkeypatch):
    monkeypatch.setattr(records, "READ_BYTES", window)
    rows = [{"text": 'é\u4f60\\"', "n": [1, 2.5, None, True]}, {}, {"x": {"y": -1e9}}] * 3
    assert [row for _, row in array(json.dumps(rows, indent=1, ensure_ascii=False).encode())] == rows


def test_an_array_of_nothing_has_no_rows(folder):
    (folder / "a.json").write_text(" [ ]\n")
    assert refused("a.json") == "error: a.json: no rows; expected at least one"


def test_an_array_is_read_piece_by_piece(folder):
    with open("a.json", "w") as file:
        file.write("[" + ",\n".join(json.dumps({"text": "a" * 1000}) for _ in range(20_000)) + "]")
    source = opened("a.json")
    tracemalloc.start()
    try:
        assert sum(block.num_rows for block in source.parts[0].blocks()) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


# Tables of cells


def test_cells_may_hold_delimiters_quotes_and_lines(folder):
    (folder / "a.csv").write_bytes(b'q,a\n"1, 2","say ""hi""\nthere"\n\n 3 ,\n')
    assert rows_of(opened("a.csv")) == [
        (2, {"q": "1, 2", "a": 'say "hi"\nthere'}),
        (4, None),
        (5, {"q": " 3 ", "a": ""}),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1,2,3", "a.csv:3: 3 cells; expected 2, as in the header"),
        (b"1", "a.csv:3: 1 cells; expected 2, as in the header"),
        (b"\xff,2", "a.csv:3: not UTF-8 at byte 1 of the line"),
        (b'"1"x,2', "a.csv:3: not a row of cells"),
    ],
)
def test_a_bad_row_of_cells_is_named(content, message, folder):
    (folder / "a.csv").write_bytes(b"q,a\n1,2\n" + content + b"\n3,4\n")
    source = opened("a.csv")
    (told,) = problems(source)
    assert told.startswith(message)
    assert [row for row in contents(source) if isinstance(row, dict)] == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]


def test_an_open_quote_is_told_and_not_taken_for_the_rest(folder):
    (folder / "a.csv").write_bytes(b'q,a\n1,2\n3,"4\n5,6\n')
    assert contents(opened("a.csv"))[0] == {"q": "1", "a": "2"}
    assert problems(opened("a.csv"))[0].startswith("a.csv:3: not a row of cells (unexpected end of data)")


def test_a_nul_is_no_reason_to_fail(folder):
    (folder / "a.csv").write_bytes(b"q\na\x00b\n")
    assert contents(opened("a.csv")) == [{"q": "a\x00b"}]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"q,,a", "a.csv:1: a column without a name; expected a first row with the names of the columns"),
        (b"q,a,q", "a.csv:1: two columns are called 'q'"),
    ],
)
def test_a_header_that_names_no_columns_is_refused(header, message, folder):
    (folder / "a.csv").write_bytes(header + b"\n1,2,3\n")
    assert message in refused("a.csv")


@pytest.mark.parametrize("content", ["q;a\n1;2\n", "q;a\n1,0;2,5\n", '"q";"a"\n"1";"2"\n'])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_cells_parted_by_semicolons_are_told_apart_from_a_single_column(name, content, folder):
    (folder / name).write_text(content)
    told = refused(name)
    assert told.startswith(f"error: {name}:1: ")
    assert told.endswith("    -> is it separated by ';'? only commas (.csv) and tabs (.tsv) are read")


@pytest.mark.parametrize("header", [b"q\xff,a", b'"q"x,a'])
def test_no_other_row_is_taken_for_a_header_that_cannot_be_read(header, folder):
    (folder / "a.csv").write_bytes(header + b"\n1,2\n3,4\n")
    assert refused("a.csv").startswith("error: a.csv:1: not ")


# Tables of Arrow


def test_objects_of_different_keys_come_as_they_were_written():
    import datasets

    rows = [{"m": [{"role": "user"}, {"role": "tool", "c": [{"a": i}, {"b": "x"}]}]} for i in range(3)]
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet("a.parquet")
    assert contents(opened("a.parquet")) == rows


def test_a_row_that_python_cannot_hold_is_named():
    import pyarrow
    from pyarrow import parquet

    raw = pyarrow.array([b"a", b"\xff", b"c"]).cast(pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": raw}), "a.parquet")
    first, second, third = contents(opened("a.parquet"))
    assert (first, third) == ({"text": "a"}, {"text": "c"})
    assert str(second).startswith("a.parquet row 2: cannot be read (UnicodeDecodeError")


def test_a_block_holds_no_more_than_its_rows():
    write_any("stream.arrow", [{"text": "a" * 100}] * 20_000)
    assert max(len(block.payload) for block in opened("stream.arrow").parts[0].blocks()) < 120_000


def test_a_damaged_page_is_a_problem_of_its_file(folder):
    write_any("a.parquet", texts(3000))
    content = bytearray((folder / "a.parquet").read_bytes())
    content[60:400] = b"\xff" * 340
    (folder / "a.parquet").write_bytes(content)
    assert refused("a.parquet").startswith("error: a.parquet: damaged or unreadable (")


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_a_table_cut_short_is_refused_or_ends_with_a_problem(name, folder):
    write_any(name, texts(3000))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) * 2 // 3])
    try:
        told = "".join(problems(opened(name)))
    except UserError as error:
        told = str(error)
    assert f"{name}: " in told and ("damaged or unreadable" in told or "not a readable parquet file" in told)


def test_a_compressed_table_cut_short_is_told(folder):
    write_any("stream.arrow", texts(3000))
    (folder / "stream.arrow.gz").write_bytes(gzip.compress((folder / "stream.arrow").read_bytes()))
    assert contents(opened("stream.arrow.gz")) == texts(3000)
    (folder / "stream.arrow.gz").write_bytes((folder / "stream.arrow.gz").read_bytes()[:-1])
    assert "stream.arrow.gz: damaged or unreadable (EOFError: cut short)" in refused("stream.arrow.gz")


# Damage


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_compressed_file_cut_short_is_told_and_never_taken_for_whole(suffix, kind, folder):
    name = f"a.{kind}{suffix}"
    rows = [{"text": random.Random(i).randbytes(50).hex(), "n": i} for i in range(20_000)]
    write_any(name, rows)
    whole = (folder / name).read_bytes()
    for num_bytes in (0, 1, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:num_bytes])
        if num_bytes < 2:
            assert re.search(rf"{name}: (cut short|damaged \(BadGzipFile.*\)) after line 0", refused(name))
            continue
        numbers, read = zip(*rows_of(opened(name)), strict=True)
        assert [row["text"] for row in read[:-1]] == [row["text"] for row in rows[: len(read) - 1]]
        assert isinstance(read[-1], Problem)
        line = int(str(read[-1]).removeprefix(f"{name}: cut short after {'row' if kind == 'json' else 'line'} "))
        assert numbers[-2:] == (line, line + 1)
        assert line > 5000 or suffix in (".bz2", ".xz")  # these decompress much at once
        if suffix == ".gz" and num_bytes > len(whole) // 2:
            assert len(read) == 20_001  # only the checksum was cut


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])  # a checksum in .zst is up to who wrote it
def test_damage_inside_a_compressed_file_is_told(suffix, folder):
    name = f"a.jsonl{suffix}"
    write_any(name, [{"text": random.Random(i).randbytes(50).hex()} for i in range(20_000)])
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 255
    (folder / name).write_bytes(content)
    try:
        told = problems(opened(name))[-1]
    except UserError as error:
        told = str(error)
    assert f"{name}: damaged (" in told or f"{name}: cut short" in told


def test_something_else_behind_a_suffix_is_told(folder):
    (folder / "a.jsonl.gz").write_bytes(lines(texts(3)))
    assert "a.jsonl.gz: damaged (BadGzipFile" in refused("a.jsonl.gz")
    (folder / "a.parquet").write_bytes(lines(texts(3)))
    assert "a.parquet: not a readable parquet file" in refused("a.parquet")
    (folder / "a.zip").write_bytes(lines(texts(3)))
    assert "a.zip: a damaged archive, or cut short" in refused("a.zip")
    (folder / "a.tar").write_bytes(lines(texts(300)))
    assert "a.tar: a damaged archive, or cut short" in refused("a.tar")


def test_files_one_after_another_in_a_compressed_file_are_one(folder):
    for suffix, compress in COMPRESS.items():
        (folder / f"a.jsonl{suffix}").write_bytes(compress(lines(texts(3))) + compress(lines(texts(2, 3))))
        assert contents(opened(f"a.jsonl{suffix}")) == texts(5)


# Archives

EVIL = [
    "../train.jsonl",
    "data/../../train.jsonl",
    "/tmp/train.jsonl",
    "..\\train.jsonl",
    "C:\\train.jsonl",
    "C:t.jsonl",
]


@pytest.mark.parametrize("member", EVIL)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_member_outside_its_folder_refuses_the_archive(member, kind, folder):
    members = {"good.jsonl": lines(texts(3)), member: lines(texts(3))}
    if kind == "zip":
        pack_zip(folder / "a.zip", members)
    else:
        (folder / "a.tar").write_bytes(tar_bytes(members))
    told = refused(f"a.{kind}")
    assert f"a.{kind}!{member}: a path that leaves the folder it is unpacked in" in told


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_link_refuses_a_tar(kind):
    with tarfile.open("a.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("train.jsonl")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert "a.tar.gz!train.jsonl: a link or a special file; expected an archive of plain files" in refused("a.tar.gz")


def test_a_link_refuses_a_zip():
    with zipfile.ZipFile("a.zip", "w") as archive:
        info = zipfile.ZipInfo("train.jsonl")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    assert "a.zip!train.jsonl: a link or a special file" in refused("a.zip")


def test_an_encrypted_member_is_told(folder):
    pack_zip(folder / "a.zip", {"train.jsonl": lines(texts(3))})
    content = bytearray((folder / "a.zip").read_bytes())
    for signature, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        content[content.index(signature) + flags] |= 1
    (folder / "a.zip").write_bytes(content)
    assert "a.zip!train.jsonl: encrypted" in refused("a.zip")


def test_an_archive_without_data_is_told(folder):
    hidden = {"README.md": b"a", "__MACOSX/._train.jsonl": b"a", ".train.jsonl": b"a"}
    pack_zip(folder / "a.zip", hidden)
    assert "a.zip: an archive without a data file; expected files that end in .jsonl" in refused("a.zip")
    (folder / "a.tar").write_bytes(tar_bytes(hidden))
    assert "a.tar: an archive without a data file" in refused("a.tar")


def test_members_may_be_compressed_or_tables(folder):
    write_any("a.parquet", texts(3))
    members = {"a.parquet": (folder / "a.parquet").read_bytes(), "b.jsonl.gz": gzip.compress(lines(texts(3)))}
    pack_zip(folder / "a.zip", members)
    (folder / "a.tgz").write_bytes(gzip.compress(tar_bytes(members)))
    for name in ("a.zip", "a.tgz"):
        assert contents(opened(name)) == texts(3) * 2


@pytest.mark.parametrize("cut", [700, 1536, 2048, 3000])  # in a member, at its end, between members, in a header
def test_a_tar_cut_short_is_told(cut, folder):
    content = tar_bytes({"0.jsonl": b'{"n": 1}\n' * 100, "1.jsonl": b'{"n": 1}\n' * 100})
    (folder / "a.tar").write_bytes(content[:cut])
    assert "a.tar: a damaged archive, or cut short" in refused("a.tar")


def test_members_of_a_tar_can_be_read_in_any_order(folder):
    members = {f"{i}.jsonl": lines(texts(50, 50 * i)) for i in range(4)}
    (folder / "a.tgz").write_bytes(gzip.compress(tar_bytes(members)))
    source = opened("a.tgz")
    for order in ([2, 0, 1, 3], [3, 3, 0]):
        for i in order:
            assert [row for _, _, row in read_rows(source.parts[i : i + 1])] == texts(50, 50 * i)
    many = [part.blocks() for part in source.parts]
    rows = [list(part.rows(block)) for part, blocks in zip(source.parts, many, strict=True) for block in blocks]
    assert [row for block in rows for _, row in block if row] == texts(200)


def test_a_compressed_tar_is_decompressed_once_for_all_members(folder, monkeypatch):
    members = {f"{i}.jsonl": lines(texts(50, 50 * i)) for i in range(6)}
    (folder / "a.tgz").write_bytes(gzip.compress(tar_bytes(members)))
    source = opened("a.tgz")
    open_tar, calls = archives._open_tar, []
    monkeypatch.setattr(archives, "_open_tar", lambda path: calls.append(path) or open_tar(path))
    assert contents(source) == texts(300)
    assert len(calls) == 1


# Names


def test_a_pattern_takes_all_files_in_order(folder):
    for i in (1, 0, 10):
        (folder / "data" / str(i)).mkdir(parents=True)
        (folder / "data" / str(i) / "rows.jsonl").write_bytes(lines(texts(2, i)))
    (folder / "data" / "more.csv").write_text("text,n\na,1\n")
    source = opened("data/**/*.jsonl")
    assert [part.name for part in source.parts] == [f"data/{i}/rows.jsonl" for i in (0, 1, 10)]
    assert contents(source) == [*texts(2, 0), *texts(2, 1), *texts(2, 10)]
    assert source.name == "data/**/*.jsonl"
    assert source.origin(2, 1) == "data/10/rows.jsonl:1"
    assert len(opened("data/**/*.*").parts) == 4


def test_a_folder_gives_its_files_or_those_of_the_split(folder):
    data = folder / "data"
    for name in ("b.jsonl", "a.csv", "sub/c.jsonl", ".hidden.jsonl", "README.md", "dataset_infos.json"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("text\na\n" if name.endswith("csv") else '{"text": "a"}\n')
    assert [part.name for part in opened("data/").parts] == ["data/a.csv", "data/b.jsonl", "data/sub/c.jsonl"]
    make_folder(folder / "sorted", "train-0.jsonl", "train-1.jsonl", "test.jsonl", "validation/0.jsonl")
    assert [part.name for part in opened("sorted").parts] == ["sorted/train-0.jsonl", "sorted/train-1.jsonl"]
    assert [part.name for part in opened("sorted", "validation").parts] == ["sorted/validation/0.jsonl"]
    told = refused("sorted", "validatoin")
    assert "dataset_split: sorted has no file of split 'validatoin'; expected train, validation, test" in told
    assert "did you mean 'validation'?" in told


def make_folder(path, *names):
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text('{"text": "a"}\n')


@pytest.mark.parametrize(
    ("named", "others", "pattern"),
    [
        (["train.jsonl"], ["more.jsonl"], "f/*.jsonl"),
        (["test.jsonl"], ["code.jsonl", "math.jsonl"], "f/*.jsonl"),
        (["train/0.jsonl.gz"], ["more/0.jsonl.gz"], "f/**/*.jsonl.gz"),
        (["my_test.jsonl"], ["mine.jsonl"], "f/*.jsonl"),
    ],
)
def test_a_folder_that_is_half_named_after_splits_is_refused_with_both_halves(named, others, pattern, folder):
    make_folder(folder / "f", *named, *others, "dataset_info.json")
    assert refused("f/") == (
        f"error: dataset: 'f' has files named after a split ({', '.join(named)}) and others ({', '.join(others)}); "
        "expected all of them named so, or none\n"
        f'    -> name a pattern: "{pattern}" takes them all; or sort them into folders such as train and test'
    )


def test_of_many_files_of_a_folder_a_few_are_named(folder):
    make_folder(folder / "f", "test.jsonl", *(f"{i}.jsonl" for i in range(6)))
    assert "(test.jsonl) and others (0.jsonl, 1.jsonl, 2.jsonl and 3 more)" in refused("f")


def test_a_split_may_be_named_anywhere_in_a_path_and_the_folder_counts_first(folder):
    make_folder(folder / "f", "sums-train.jsonl", "sums_Test.jsonl", "test/train-of-thought.jsonl")
    assert [part.name for part in opened("f").parts] == ["f/sums-train.jsonl"]
    assert [part.name for part in opened("f", "test").parts] == ["f/sums_Test.jsonl", "f/test/train-of-thought.jsonl"]


def test_a_split_may_have_a_name_of_its_own(folder):
    make_folder(folder / "f", "train.jsonl", "train-math.jsonl", "trainer/test.jsonl")
    assert [part.name for part in opened("f", "train-math").parts] == ["f/train-math.jsonl"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian.jsonl", "dataset: no file or folder 'trian.jsonl'; expected a file (.jsonl, .ndjson, .json, .csv"),
        ("trian.jsonl", "did you mean 'train.jsonl'?"),
        ("trian*.jsonl", "dataset: no file or folder 'trian*.jsonl'"),
        ("trian*.jsonl", "did you mean 'train.jsonl'?"),
        ("nowhere/*/x.jsonl", "no file or folder 'nowhere/*/x.jsonl', nor a folder 'nowhere'"),
        ("./nowhere/x", "no file or folder './nowhere/x', nor a folder 'nowhere'"),
        ("train.zip", "no file or folder 'train.zip'"),
        ("train.pt", "dataset: 'train.pt' ends in '.pt'; expected .jsonl"),
        ("train.jsonl.lz4", "'train.jsonl.lz4' ends in '.lz4'"),
        ("*.pt", "'train.pt' ends in '.pt'"),
        ("empty", "'empty' is a folder without state.json and without data files"),
        ("a" * 300 + ".jsonl", "cannot be read (File name too long)"),
        ("someone/something", "no file or folder 'someone/something', and split 'train' of hub id"),
        ("someone/something", "offline (HF_HUB_OFFLINE is set)"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(name, message, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write_any("train.jsonl", texts(1))
    (folder / "train.pt").write_bytes(b"\x80\x02N.")
    (folder / "train.jsonl.lz4").touch()
    (folder / "empty").mkdir()
    assert message in refused(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "train.jsonl: no rows; expected at least one"),
        ("\n\n", "train.jsonl: no rows; expected at least one"),
        ("{}\n", "train.jsonl: no rows; expected at least one"),
        ("}\n}\n", "train.jsonl:2: not JSON"),
    ],
)
def test_a_file_without_a_usable_row_is_told(content, message, folder):
    (folder / "train.jsonl").write_text(content)
    assert message in refused("train.jsonl")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_object_over_several_lines_is_told_as_one_problem(end, folder):
    (folder / "a.json").write_text(json.dumps({"data": texts(20)}, indent=2).replace("\n", end), newline="")
    told = refused("a.json").splitlines()
    assert told[0].startswith("error: a.json:1: not JSON at column 2 (Expecting property name")
    assert told[1:] == [
        "    -> is it one object over several lines? write each sample on one line, or all as a JSON array"
    ]


def test_problems_are_counted_and_the_first_ten_shown_with_one_way_out(folder):
    (folder / "train.jsonl").write_text("}\n" * 612)
    told = refused("train.jsonl").splitlines()
    assert told[0] == "error: 612 problems, 10 of them shown"
    assert told[10].startswith("  - train.jsonl:10: not JSON")
    assert told[11:] == ["  - train.jsonl: ... and 602 more problems", "    -> mend or remove such rows"]
    (folder / "train.jsonl").write_text("}\n" * 2)
    told = refused("train.jsonl").splitlines()
    assert told[0] == "error: 2 problems" and told[3:] == ["    -> mend or remove such rows"]


def test_rows_are_not_to_be_mended_where_the_file_is_at_fault(folder):
    (folder / "train.jsonl.gz").write_bytes(b"")
    assert refused("train.jsonl.gz") == "error: train.jsonl.gz: cut short after line 0"


def test_several_data_sets_have_their_problems_counted_together():
    first, second = ([Problem(f"{name}.jsonl:{i}", "bad") for i in range(1, 13)] for name in "ab")
    told = str(UserError(*shown(first, "a.jsonl"), *shown(second, "b.jsonl")))
    assert told.splitlines()[0] == "error: 24 problems, 20 of them shown"


def test_a_way_out_that_a_problem_has_stays():
    long = Problem("a.jsonl:2", "long", fix="split it")
    assert shown([Problem("a.jsonl:1", "bad"), long], "a.jsonl") == [Problem("a.jsonl:1", "bad", fix=FIX), long]
    refusal = Problem("chat_template", "refuses it")
    assert shown([refusal], "a.jsonl") == [refusal]


def test_the_columns_are_those_of_the_first_good_row(folder):
    (folder / "train.jsonl").write_text('\n{\n{"a": 1, "b": 2}\n{"c": 3}\n')
    assert opened("train.jsonl").columns == ["a", "b"]


def test_a_slice_of_a_file_is_refused(folder):
    write_any("train.jsonl", texts(3))
    told = refused("train.jsonl", "train[:10%]")
    assert "dataset_split: 'train[:10%]', but 'train.jsonl' is no hub id; expected the name of a split" in told


def test_a_file_that_may_not_be_read_is_told(folder):
    def deny(path):
        raise PermissionError(13, "Permission denied")

    write_any("train.jsonl", texts(3))
    assert "dataset: 'train.jsonl' cannot be read (Permission denied)" in refused("train.jsonl", digest=deny)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("d/sums.jsonl.gz", "sums"),
        ("d/sums.TXZ", "sums"),
        ("d/.jsonl", "jsonl"),
        ("d/folder/*.jsonl", "folder"),
        ("d/folder/**/*.jsonl", "folder"),
        ("d/folder/**", "folder"),
        ("d/folder/part-*.jsonl", "part"),
        ("d/*/sums.jsonl", "sums"),
        ("*.jsonl", "here"),
        ("../here/*", "here"),
        ("d/folder", "folder"),
        ("d/folder/", "folder"),
        ("d/v1.5", "v1.5"),
        (".", "here"),
        ("d/..", "here"),
        ("/", "/"),
        ("d/" + "x" * 300, "d/" + "x" * 300),
        ("openai/gsm8k", "openai/gsm8k"),
        ("gsm8k", "gsm8k"),
    ],
)
def test_a_data_set_is_named_by_a_word_for_tables(path, name, folder, monkeypatch):
    (folder / "here" / "d" / "folder").mkdir(parents=True)
    (folder / "here" / "d" / "v1.5").mkdir()
    monkeypatch.chdir(folder / "here")
    assert DatasetEntry(path=path).filled(None, "train", {}).name == name
    assert DatasetEntry(path=path, name="mine").filled(None, "train", {}).name == "mine"


def test_every_suffix_that_is_read_is_known_where_data_sets_are_named():
    kinds = {suffix + packed for suffix in (*SUFFIXES, ".tar") for packed in ("", *archives.DECOMPRESSORS)}
    assert kinds | {".zip", *archives.TAR_COMPRESSIONS} <= set(DATA_SUFFIXES)
    assert set(archives.TAR_COMPRESSIONS.values()) == set(archives.DECOMPRESSORS)


# Digests


def test_the_digest_is_of_content_and_kind_wherever_it_lies(folder):
    (folder / "other").mkdir()
    for name in ("a.jsonl", "other/b.jsonl", "a.csv"):
        (folder / name).write_bytes(lines(texts(3)))
    digest = opened("a.jsonl").digest
    assert opened("other/b.jsonl").digest == opened("other").digest == opened("./*.jsonl").digest == digest
    seen = {digest, opened("a.csv").digest, opened("*.*").digest}
    (folder / "a.jsonl").write_bytes(lines(texts(3)).replace(b"0", b"7"))
    seen.add(opened("a.jsonl").digest)
    assert len(seen) == 4


def test_a_stream_of_files_is_not_read_to_be_told_apart(folder):
    def forbid(path):
        pytest.fail("hashed")

    write_any("a.jsonl", texts(3))
    first = opened("a.jsonl", streaming=True, digest=forbid)
    assert contents(first) == texts(3)
    write_any("b.jsonl", texts(3))
    assert opened("b.jsonl", streaming=True, digest=forbid).digest != first.digest
    write_any("a.jsonl", texts(4))
    assert opened("a.jsonl", streaming=True, digest=forbid).digest != first.digest


# Data sets of the library


def test_saved_folders_give_the_same_rows_as_lines(folder):
    import datasets

    table = datasets.Dataset.from_list(texts(2300))
    table.save_to_disk("one", num_shards=2)
    datasets.DatasetDict({"train": table, "test": table.select([7])}).save_to_disk("several")
    for name in ("one", "several"):
        source = opened(name)
        assert contents(source) == texts(2300)
        assert contents(source, ["n", "else"])[5] == {"n": 5}
        assert (source.total, source.unit, source.columns) == (2300, " rows", ["text", "n"])
        assert source.origin(0, 2) == f"{name} row 2"
        assert pickle.loads(pickle.dumps(source)).parts[0].size == 2300
    assert contents(opened("several", "test")) == texts(1, 7)
    assert opened("several", "test").digest != opened("several").digest
    told = refused("several", "tset")
    assert "dataset_split: several has no split 'tset'; expected train, test" in told and "'test'?" in told
    assert "is no hub id" in refused("one", "train[:1%]")


@pytest.mark.parametrize("content", ['{"splits": ["tra', '{"names": []}', "[1]", '{"splits": 1}'])
def test_a_damaged_list_of_splits_is_told(content, folder):
    (folder / "saved").mkdir()
    (folder / "saved" / "dataset_dict.json").write_text(content)
    assert "dataset: 'saved' cannot be opened: its dataset_dict.json is damaged" in refused("saved")


def test_a_damaged_saved_folder_is_told(folder):
    (folder / "saved").mkdir()
    (folder / "saved" / "state.json").write_text("{}")
    assert "dataset: 'saved' cannot be opened (" in refused("saved")


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train-*}
  - {split: test, path: test.jsonl}
- config_name: socratic
  data_files:
  - {split: train, path: test.jsonl}
---
"""


@pytest.fixture
def hub(tmp_path_factory, monkeypatch):
    """A data set with two configs that the library knows as ``someone/sums``, read by the library's own code."""
    import datasets

    place, cache = tmp_path_factory.mktemp("sums"), str(tmp_path_factory.mktemp("hub-cache"))
    for i in range(2):
        (place / f"train-{i}.jsonl").write_bytes(lines(texts(1500, 1500 * i)))
    (place / "test.jsonl").write_bytes(lines(texts(3)))
    (place / "README.md").write_text(CARD)

    def load(name, config, **options):
        assert name == "someone/sums"
        return real(str(place), config, cache_dir=cache, **options)

    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "someone/sums"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_data_set_has_a_config_and_splits(hub, streaming):
    source = opened(hub, config="main", streaming=streaming)
    assert contents(source) == texts(3000)
    assert contents(source, ["n"])[1700] == {"n": 1700}
    assert (source.columns, source.unit, source.name) == (["text", "n"], " rows", "someone/sums[main, train]")
    assert len(source.parts) == (2 if streaming else 1)
    assert source.origin(0, 2) == f"someone/sums[main, train]{' shard 0' if streaming else ''} row 2"
    other = opened(hub, "test", config="main", streaming=streaming)
    assert contents(other) == texts(3) and other.digest != source.digest
    assert opened(hub, config="socratic", streaming=streaming).digest not in (source.digest, other.digest)
    parts = pickle.loads(pickle.dumps(source.parts))
    assert list(parts[-1].blocks()) == list(source.parts[-1].blocks())
    assert opened(hub, config="main", streaming=streaming).digest == source.digest


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("split", "config", "message"),
    [
        ("train", None, "dataset_config: someone/sums needs one of main, socratic\n    -> --dataset_config main"),
        ("train", "mian", "dataset_config: someone/sums has no config 'mian'; expected main, socratic\n    -> did you"),
        ("tset", "main", "dataset_split: someone/sums has no split 'tset'; expected train, test\n    -> did you mean"),
    ],
)
def test_what_a_hub_data_set_offers_is_told(hub, streaming, split, config, message):
    assert message in refused(hub, split, config=config, streaming=streaming)


def test_a_slice_of_a_split_is_read_but_not_as_a_stream(hub):
    source = opened(hub, "train[:10%]", config="main")
    assert contents(source) == texts(300)
    assert source.digest != opened(hub, config="main").digest
    told = refused(hub, "train[:10%]", config="main", streaming=True)
    assert "dataset_split: 'train[:10%]': a stream has no slices; expected train, test" in told


def test_an_unreachable_hub_is_told_without_retries(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    told = refused("someone/something")
    assert "the hub cannot be reached (ConnectionError: no route)" in told and "HF_HUB_OFFLINE=1" in told


def test_a_break_in_a_stream_ends_with_a_problem(hub, monkeypatch):
    source = opened(hub, config="main", streaming=True)

    def fail(self, columns):
        yield from real(self, columns)
        raise ConnectionError("gone")

    real = tables.Shard._tables
    monkeypatch.setattr(tables.Shard, "_tables", fail)
    read = contents(source)
    assert len(read) == 3002
    assert str(read[1500]) == "someone/sums[main, train] shard 0: damaged or unreadable (ConnectionError: gone)"


def test_links_to_folders_are_followed_once(tmp_path):
    for folder in ("data", "elsewhere"):
        (tmp_path / folder).mkdir()
    write_any("data/a.jsonl", [{"text": "a"}])
    write_any("elsewhere/b.jsonl", [{"text": "b"}])
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "data")
    assert [row["text"] for row in contents(opened("data"))] == ["a", "b"]


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"'pipe.jsonl' is neither a file nor a folder"):
        opened("pipe.jsonl")


def test_an_unknown_home_is_told_as_any_other_name():
    with pytest.raises(UserError, match=r"no file or folder '~nobody-of-that-name/x.jsonl'"):
        opened("~nobody-of-that-name/x.jsonl")
